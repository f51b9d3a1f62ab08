#include "daemon/metrics.h"

#include <array>
#include <string_view>

#include <prometheus/text_serializer.h>

namespace larder::daemon {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr std::array<std::string_view, std::variant_size_v<protocol::RequestBody>> kOps = {
    "connect",       "goodbye", "open_pool",    "close_pool", "destroy_pool", "open_segments",
    "allocate",      "release", "publish",      "lookup",     "copy",         "list_pools",
    "list_sessions", "status",  "capabilities", "unserved"};

// A family that is made anew at each scrape.
class Family {
 public:
  Family(std::vector<MetricFamily>& all, std::string name, std::string help, MetricType type)
      : all_(all), family_{std::move(name), std::move(help), type, {}} {}
  ~Family() { all_.push_back(std::move(family_)); }
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  void add(std::vector<ClientMetric::Label> labels, double value) {
    ClientMetric metric;
    metric.label = std::move(labels);
    (family_.type == MetricType::Gauge ? metric.gauge.value : metric.counter.value) = value;
    family_.metric.push_back(std::move(metric));
  }

 private:
  std::vector<MetricFamily>& all_;
  MetricFamily family_;
};

std::vector<ClientMetric::Label> pool_labels(const PoolStats& pool, const std::string& name = "",
                                             const std::string& value = "") {
  std::vector<ClientMetric::Label> labels = {{"tenant", pool.tenant}, {"pool", pool.name}};
  if (!name.empty()) labels.push_back({name, value});
  return labels;
}

void add_blocks(std::vector<MetricFamily>& all, const std::vector<PoolStats>& pools) {
  Family blocks(all, "larder_pool_blocks",
                "Blocks by state; their sum is the pool's capacity. cached blocks are evictable",
                MetricType::Gauge);
  for (const PoolStats& pool : pools) {
    for (const GroupStats& group : pool.groups) {
      blocks.add(pool_labels(pool, "state", "free"), static_cast<double>(group.free));
      blocks.add(pool_labels(pool, "state", "open"), static_cast<double>(group.open));
      blocks.add(pool_labels(pool, "state", "published"), static_cast<double>(group.published));
      blocks.add(pool_labels(pool, "state", "cached"), static_cast<double>(group.cached));
      blocks.add(pool_labels(pool, "state", "quarantined"), static_cast<double>(group.quarantined));
    }
  }
}

void add_bytes(std::vector<MetricFamily>& all, const std::vector<PoolStats>& pools) {
  Family bytes(all, "larder_pool_bytes",
               "Physical memory of a pool: used by blocks, or slack (padding and free blocks)",
               MetricType::Gauge);
  for (const PoolStats& pool : pools) {
    for (const GroupStats& group : pool.groups) {
      bytes.add(pool_labels(pool, "kind", "used"), static_cast<double>(group.used_bytes));
      bytes.add(pool_labels(pool, "kind", "slack"), static_cast<double>(group.slack_bytes));
    }
  }
}

using PoolCounter = uint64_t PoolStats::*;

void add_counter(std::vector<MetricFamily>& all, const std::vector<PoolStats>& pools,
                 const char* name, const char* help, PoolCounter counter) {
  Family family(all, name, help, MetricType::Counter);
  for (const PoolStats& pool : pools)
    family.add(pool_labels(pool), static_cast<double>(pool.*counter));
}

void add_gauge(std::vector<MetricFamily>& all, const char* name, const char* help, double value) {
  Family(all, name, help, MetricType::Gauge).add({}, value);
}

}  // namespace

Metrics::Metrics() {
  auto& requests = prometheus::BuildCounter()
                       .Name("larder_requests_total")
                       .Help("Requests on the control socket, by operation")
                       .Register(registry_);
  for (const std::string_view op : kOps)
    requests_.push_back(&requests.Add({{"op", std::string(op)}}));
  auto& refusals = prometheus::BuildCounter()
                       .Name("larder_refusals_total")
                       .Help("Requests that were refused, by error code")
                       .Register(registry_);
  for (int code = 0; code < kNumErrorCodes; ++code)
    refusals_.push_back(
        code == 0 ? nullptr
                  : &refusals.Add(
                        {{"reason", std::string(error_code_name(static_cast<ErrorCode>(code)))}}));
}

void Metrics::count_request(const protocol::RequestBody& body) {
  requests_[body.index()]->Increment();
}

void Metrics::count_refusal(ErrorCode code) { refusals_[static_cast<size_t>(code)]->Increment(); }

void Metrics::set_executor_counters(const protocol::Counters& counters) {
  for (const protocol::PoolCounters& pool : counters.pools) executor_[pool.pool].now = pool;
}

void Metrics::executor_died() {
  for (auto& [pool, counters] : executor_) {
    counters.before.appended_tokens += counters.now.appended_tokens;
    counters.before.attended_rows += counters.now.attended_rows;
    counters.before.refusals += counters.now.refusals;
    counters.now = {};
  }
}

void Metrics::forget_pool(uint64_t pool) { executor_.erase(pool); }

void Metrics::add_executor_counters(protocol::PoolInfo& info) const {
  const auto found = executor_.find(info.pool);
  if (found == executor_.end()) return;
  const auto& [before, now] = found->second;
  info.appended_tokens_total = before.appended_tokens + now.appended_tokens;
  info.attended_rows_total = before.attended_rows + now.attended_rows;
}

void Metrics::add_executor_families(std::vector<prometheus::MetricFamily>& all,
                                    const std::vector<PoolStats>& pools) const {
  Family appended(all, "larder_appended_tokens_total",
                  "Tokens appended on request, summed over layers", MetricType::Counter);
  Family attended(all, "larder_attended_rows_total",
                  "Query rows attended on request, summed over layers", MetricType::Counter);
  Family refused(all, "larder_submission_refusals_total", "Calls on request that were refused",
                 MetricType::Counter);
  for (const PoolStats& pool : pools) {
    const auto found = executor_.find(value(pool.pool));
    const ExecutorCounters counters = found == executor_.end() ? ExecutorCounters{} : found->second;
    const auto& [before, now] = counters;
    appended.add(pool_labels(pool),
                 static_cast<double>(before.appended_tokens + now.appended_tokens));
    attended.add(pool_labels(pool), static_cast<double>(before.attended_rows + now.attended_rows));
    refused.add(pool_labels(pool), static_cast<double>(before.refusals + now.refusals));
  }
}

std::string Metrics::render(const std::vector<PoolStats>& pools,
                            const protocol::DaemonStatus& status,
                            int64_t num_closing_sessions) const {
  std::vector<MetricFamily> all = registry_.Collect();
  add_gauge(all, "larder_ready", "1 when requests of every kind can be served", status.ready);
  add_gauge(all, "larder_memory_limit_bytes", "Memory that all pools together may take",
            static_cast<double>(status.memory_bytes));
  add_gauge(all, "larder_physical_bytes", "Memory of all pools",
            static_cast<double>(status.physical_bytes));
  add_gauge(all, "larder_keeper_segments", "File descriptors that the keeper holds",
            static_cast<double>(status.keeper_segments));
  {
    Family sessions(all, "larder_sessions",
                    "Sessions; closing ones have lost their connection while their process lives",
                    MetricType::Gauge);
    sessions.add({{"state", "connected"}}, static_cast<double>(status.num_sessions));
    sessions.add({{"state", "closing"}}, static_cast<double>(num_closing_sessions));
  }
  Family(all, "larder_executor_restarts_total", "Executors that died", MetricType::Counter)
      .add({}, static_cast<double>(status.executor_restarts));
  add_blocks(all, pools);
  add_bytes(all, pools);
  add_counter(all, pools, "larder_allocated_blocks_total", "Blocks handed out",
              &PoolStats::allocated_blocks_total);
  add_counter(all, pools, "larder_evicted_blocks_total", "Cached blocks taken back",
              &PoolStats::evicted_blocks_total);
  add_counter(all, pools, "larder_published_blocks_total", "Blocks published under a key",
              &PoolStats::published_blocks_total);
  add_counter(all, pools, "larder_lookup_tokens_total", "Tokens asked for in prefix lookups",
              &PoolStats::lookup_tokens_total);
  add_counter(all, pools, "larder_lookup_hit_tokens_total", "Tokens found in prefix lookups",
              &PoolStats::lookup_hit_tokens_total);
  add_executor_families(all, pools);
  return prometheus::TextSerializer().Serialize(all);
}

}  // namespace larder::daemon
