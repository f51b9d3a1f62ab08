#include "daemon/metrics.h"

#include <doctest/doctest.h>

namespace larder::daemon {
namespace {

bool has(const std::string& text, const std::string& line) {
  return text.find("\n" + line + "\n") != std::string::npos;
}

PoolStats pool() {
  PoolStats stats;
  stats.pool = PoolId{4};
  stats.tenant = "t";
  stats.name = "a\"b\\c\nd";
  stats.groups.resize(1);
  stats.groups[0].capacity = 10;
  stats.groups[0].cached = 3;
  stats.groups[0].free = 7;
  return stats;
}

TEST_CASE("live and cached blocks are separate figures, and labels are escaped") {
  const Metrics metrics;
  const std::string text = metrics.render({pool()}, {}, 0);
  const std::string labels = R"({tenant="t",pool="a\"b\\c\nd",state=)";
  CHECK(has(text, "larder_pool_blocks" + labels + "\"open\"} 0"));
  CHECK(has(text, "larder_pool_blocks" + labels + "\"cached\"} 3"));
  CHECK(has(text, "larder_pool_blocks" + labels + "\"free\"} 7"));
}

TEST_CASE("every refusal code and every op is there from the first scrape on") {
  Metrics metrics;
  for (int code = 1; code < kNumErrorCodes; ++code)
    CHECK(has(metrics.render({}, {}, 0),
              "larder_refusals_total{reason=\"" +
                  std::string(error_code_name(static_cast<ErrorCode>(code))) + "\"} 0"));
  metrics.count_refusal(ErrorCode::kBusy);
  metrics.count_request(protocol::Allocate{});
  metrics.count_request(protocol::Unserved{"evict"});
  const std::string text = metrics.render({}, {}, 0);
  CHECK(has(text, "larder_refusals_total{reason=\"BUSY\"} 1"));
  CHECK(has(text, "larder_requests_total{op=\"allocate\"} 1"));
  CHECK(has(text, "larder_requests_total{op=\"unserved\"} 1"));
  CHECK(has(text, "larder_requests_total{op=\"capabilities\"} 0"));
}

TEST_CASE("the executor's counters go on over its restarts and go with the pool") {
  Metrics metrics;
  metrics.set_executor_counters({{{4, 100, 10, 1}}});
  metrics.set_executor_counters({{{4, 150, 20, 1}}});
  metrics.executor_died();
  metrics.set_executor_counters({{{4, 5, 6, 7}}});
  protocol::PoolInfo info;
  info.pool = 4;
  metrics.add_executor_counters(info);
  CHECK(info.appended_tokens_total == 155);
  CHECK(info.attended_rows_total == 26);
  const std::string labels = R"({tenant="t",pool="a\"b\\c\nd"})";
  CHECK(has(metrics.render({pool()}, {}, 0), "larder_submission_refusals_total" + labels + " 8"));
  metrics.forget_pool(4);
  CHECK(has(metrics.render({pool()}, {}, 0), "larder_appended_tokens_total" + labels + " 0"));
}

}  // namespace
}  // namespace larder::daemon
