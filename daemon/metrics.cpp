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
    "connect",         "goodbye",       "open_pool",    "close_pool",
    "destroy_pool",    "open_segments", "allocate",     "release",
    "publish",         "lookup",        "copy",         "list_pools",
    "list_sessions",   "status",        "capabilities", "resume",
    "resize_pool",     "evict",         "set_quota",    "list_tenants",
    "register_import", "drop_import"};

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
  auto& fences = prometheus::BuildHistogram()
                     .Name("larder_fence_seconds")
                     .Help("From the end of a session to when its open blocks could be used again")
                     .Register(registry_);
  const prometheus::Histogram::BucketBoundaries bounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                          0.1,   0.25,   0.5,   1,    2.5,   10};
  for (int fence = 0; fence < kNumFenceClasses; ++fence)
    fences_.push_back(&fences.Add(
        {{"fence", std::string(fence_class_name(static_cast<FenceClass>(fence)))}}, bounds));
}

void Metrics::count_request(const protocol::RequestBody& body) {
  requests_[body.index()]->Increment();
}

void Metrics::count_refusal(ErrorCode code) { refusals_[static_cast<size_t>(code)]->Increment(); }

void Metrics::observe_fence(FenceClass fence, int64_t took_us) {
  fences_[static_cast<size_t>(fence)]->Observe(static_cast<double>(took_us) / 1e6);
}

namespace {

void add_executed(std::vector<MetricFamily>& all, const Metrics::Scrape& scrape) {
  Family appended(all, "larder_appended_tokens_total",
                  "Tokens appended on request, summed over layers", MetricType::Counter);
  Family attended(all, "larder_attended_rows_total",
                  "Query rows attended on request, summed over layers", MetricType::Counter);
  Family refused(all, "larder_submission_refusals_total", "Calls on request that were refused",
                 MetricType::Counter);
  for (const PoolStats& pool : scrape.pools) {
    const auto found = scrape.executed.find(pool.pool);
    const Metrics::Executed done =
        found == scrape.executed.end() ? Metrics::Executed{} : found->second;
    appended.add(pool_labels(pool), static_cast<double>(done.appended_tokens));
    attended.add(pool_labels(pool), static_cast<double>(done.attended_rows));
    refused.add(pool_labels(pool), static_cast<double>(done.refusals));
  }
}

void add_quarantined(std::vector<MetricFamily>& all, const std::vector<PoolStats>& pools) {
  Family blocks(all, "larder_quarantined_blocks",
                "Blocks of ended sessions that something may still write, by what will prove that "
                "nothing does",
                MetricType::Gauge);
  for (const PoolStats& pool : pools)
    for (int fence = 1; fence < kNumFenceClasses; ++fence) {
      int64_t sum = 0;
      for (const GroupStats& group : pool.groups) sum += group.by_fence[fence];
      blocks.add(
          pool_labels(pool, "fence", std::string(fence_class_name(static_cast<FenceClass>(fence)))),
          static_cast<double>(sum));
    }
}

void add_tenants(std::vector<MetricFamily>& all, const std::vector<TenantStats>& tenants) {
  Family bytes(all, "larder_tenant_bytes",
               "Memory of a tenant: guaranteed, used, evictable (part of used), leaving (part of "
               "used: given back but still mapped)",
               MetricType::Gauge);
  for (const TenantStats& tenant : tenants)
    for (const auto& [kind, value] :
         {std::pair("guaranteed", tenant.guaranteed_bytes), std::pair("used", tenant.used_bytes),
          std::pair("evictable", tenant.evictable_bytes),
          std::pair("leaving", tenant.leaving_bytes)})
      bytes.add({{"tenant", tenant.name}, {"kind", kind}}, static_cast<double>(value));
}

}  // namespace

std::string Metrics::render(const Scrape& scrape) const {
  const std::vector<PoolStats>& pools = scrape.pools;
  const protocol::DaemonStatus& status = scrape.status;
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
                    "Sessions; absent ones have not come back after a restart, of closing ones "
                    "something may still write",
                    MetricType::Gauge);
    sessions.add({{"state", "connected"}},
                 static_cast<double>(status.num_sessions - scrape.num_absent));
    sessions.add({{"state", "absent"}}, static_cast<double>(scrape.num_absent));
    sessions.add({{"state", "closing"}}, static_cast<double>(scrape.num_closing));
  }
  Family(all, "larder_executor_restarts_total", "Executors that died", MetricType::Counter)
      .add({}, static_cast<double>(status.executor_restarts));
  add_gauge(all, "larder_journal_bytes", "Bytes of the journal in use",
            static_cast<double>(status.journal_bytes));
  Family(all, "larder_checkpoints_total", "Journals begun anew since larderd's start",
         MetricType::Counter)
      .add({}, static_cast<double>(status.checkpoints));
  add_tenants(all, scrape.tenants);
  add_quarantined(all, pools);
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
  add_executed(all, scrape);
  return prometheus::TextSerializer().Serialize(all);
}

}  // namespace larder::daemon
