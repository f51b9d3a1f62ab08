// Metrics: counters that larderd keeps, and the text that Prometheus reads.
//
// Gauges are read from the state machine at the scrape, so that they add up at one moment; only
// counters live here. Labels are bounded: tenants and pools come from configuration and pool
// creation, ops and codes from enums. Thread rule: the loop's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/registry.h>

#include "allocator/state_machine.h"
#include "larder/status.h"
#include "protocol/executor_messages.h"
#include "protocol/messages.h"

namespace larder::daemon {

class Metrics {
 public:
  Metrics();

  void count_request(const protocol::RequestBody& body);
  void count_refusal(ErrorCode code);
  // The executor counts from its own start; these figures go on over its restarts.
  void set_executor_counters(const protocol::Counters& counters);
  void executor_died();
  void forget_pool(uint64_t pool);
  void add_executor_counters(protocol::PoolInfo& info) const;

  // Everything, as text/plain; version=0.0.4.
  std::string render(const std::vector<PoolStats>& pools, const protocol::DaemonStatus& status,
                     int64_t num_closing_sessions) const;

 private:
  struct ExecutorCounters {
    protocol::PoolCounters before;  // of executors that have died
    protocol::PoolCounters now;
  };

  void add_executor_families(std::vector<prometheus::MetricFamily>& all,
                             const std::vector<PoolStats>& pools) const;

  prometheus::Registry registry_;
  std::vector<prometheus::Counter*> requests_;  // by index of RequestBody
  std::vector<prometheus::Counter*> refusals_;  // by ErrorCode
  std::map<uint64_t, ExecutorCounters> executor_;
};

}  // namespace larder::daemon
