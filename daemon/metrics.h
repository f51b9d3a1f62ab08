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
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "allocator/state_machine.h"
#include "larder/status.h"
#include "protocol/messages.h"

namespace larder::daemon {

class Metrics {
 public:
  Metrics();

  void count_request(const protocol::RequestBody& body);
  void count_refusal(ErrorCode code);
  // From when larderd saw the end of a session to when its blocks could be used again.
  void observe_fence(FenceClass fence, int64_t took_us);

  // What the executor has done for a pool (daemon/pool_counters.h).
  struct Executed {
    uint64_t appended_tokens = 0;
    uint64_t attended_rows = 0;
    uint64_t refusals = 0;
  };
  struct Scrape {
    std::vector<PoolStats> pools;
    std::vector<TenantStats> tenants;
    protocol::DaemonStatus status;
    std::map<PoolId, Executed> executed;
    int64_t num_closing = 0;
    int64_t num_absent = 0;
  };
  // Everything, as text/plain; version=0.0.4.
  std::string render(const Scrape& scrape) const;

 private:
  prometheus::Registry registry_;
  std::vector<prometheus::Counter*> requests_;  // by index of RequestBody
  std::vector<prometheus::Counter*> refusals_;  // by ErrorCode
  std::vector<prometheus::Histogram*> fences_;  // by FenceClass
};

}  // namespace larder::daemon
