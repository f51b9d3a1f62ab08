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

Metrics::Scrape scrape_of_pool() {
  Metrics::Scrape scrape;
  scrape.pools.push_back(pool());
  return scrape;
}

TEST_CASE("live and cached blocks are separate figures, and labels are escaped") {
  const Metrics metrics;
  const std::string text = metrics.render(scrape_of_pool());
  const std::string labels = R"({tenant="t",pool="a\"b\\c\nd",state=)";
  CHECK(has(text, "larder_pool_blocks" + labels + "\"open\"} 0"));
  CHECK(has(text, "larder_pool_blocks" + labels + "\"cached\"} 3"));
  CHECK(has(text, "larder_pool_blocks" + labels + "\"free\"} 7"));
}

TEST_CASE("every refusal code and every op is there from the first scrape on") {
  Metrics metrics;
  for (int code = 1; code < kNumErrorCodes; ++code)
    CHECK(has(metrics.render({}), "larder_refusals_total{reason=\"" +
                                      std::string(error_code_name(static_cast<ErrorCode>(code))) +
                                      "\"} 0"));
  metrics.count_refusal(ErrorCode::kBusy);
  metrics.count_request(protocol::Allocate{});
  metrics.count_request(protocol::RegisterImport{});
  const std::string text = metrics.render({});
  CHECK(has(text, "larder_refusals_total{reason=\"BUSY\"} 1"));
  CHECK(has(text, "larder_requests_total{op=\"allocate\"} 1"));
  CHECK(has(text, "larder_requests_total{op=\"register_import\"} 1"));
  CHECK(has(text, "larder_requests_total{op=\"capabilities\"} 0"));
}

TEST_CASE("what the executor has done and what is quarantined is shown by pool") {
  const Metrics metrics;
  Metrics::Scrape scrape = scrape_of_pool();
  scrape.executed[PoolId{4}] = {155, 26, 8};
  scrape.pools[0].groups[0].by_fence[static_cast<int>(FenceClass::kPidfd)] = 5;
  const std::string text = metrics.render(scrape);
  const std::string labels = R"({tenant="t",pool="a\"b\\c\nd"})";
  CHECK(has(text, "larder_appended_tokens_total" + labels + " 155"));
  CHECK(has(text, "larder_attended_rows_total" + labels + " 26"));
  CHECK(has(text, "larder_submission_refusals_total" + labels + " 8"));
  const std::string fence = R"({tenant="t",pool="a\"b\\c\nd",fence=)";
  CHECK(has(text, "larder_quarantined_blocks" + fence + "\"pidfd\"} 5"));
  CHECK(has(text, "larder_quarantined_blocks" + fence + "\"mps\"} 0"));
}

TEST_CASE("how long fencing takes is a histogram by class") {
  Metrics metrics;
  metrics.observe_fence(FenceClass::kPidfd, 3'000);
  metrics.observe_fence(FenceClass::kPidfd, 700'000);
  const std::string text = metrics.render({});
  CHECK(has(text, "larder_fence_seconds_count{fence=\"pidfd\"} 2"));
  CHECK(has(text, "larder_fence_seconds_bucket{fence=\"pidfd\",le=\"0.005\"} 1"));
  CHECK(has(text, "larder_fence_seconds_bucket{fence=\"pidfd\",le=\"1\"} 2"));
  CHECK(has(text, "larder_fence_seconds_count{fence=\"executor-only\"} 0"));
}

TEST_CASE("a tenant's bytes and the sessions that are away are shown") {
  const Metrics metrics;
  Metrics::Scrape scrape;
  scrape.tenants.push_back({"t", 100, 0, 40, 30, 10});
  scrape.status.num_sessions = 5;
  scrape.num_absent = 2;
  scrape.num_closing = 1;
  const std::string text = metrics.render(scrape);
  CHECK(has(text, "larder_tenant_bytes{tenant=\"t\",kind=\"guaranteed\"} 100"));
  CHECK(has(text, "larder_tenant_bytes{tenant=\"t\",kind=\"leaving\"} 10"));
  CHECK(has(text, "larder_sessions{state=\"connected\"} 3"));
  CHECK(has(text, "larder_sessions{state=\"absent\"} 2"));
  CHECK(has(text, "larder_sessions{state=\"closing\"} 1"));
}

}  // namespace
}  // namespace larder::daemon
