// What is within its limits also fits into a message.
#include <algorithm>

#include <doctest/doctest.h>

#include "protocol/executor_messages.h"
#include "protocol/limits.h"
#include "protocol/messages.h"

namespace larder::protocol {
namespace {

void check_accepted(const Status& status) {
  CAPTURE(status.to_string());
  CHECK(status.ok());
}

std::string text(size_t size) { return std::string(size, 'n'); }

void check_fits(const Bytes& bytes) {
  CAPTURE(bytes.size());
  CHECK(bytes.size() <= kMaxMessageBytes);
}

TEST_CASE("the largest reply of each kind fits into a message") {
  const auto fits = [](ReplyBody body) {
    const Bytes bytes = encode(Reply{1, 2, std::move(body)});
    check_fits(bytes);
    check_accepted(decode_reply(bytes).status());
  };
  fits(Status(ErrorCode::kInternal, text(2 * kMaxErrorBytes)));
  fits(Segments{std::vector<int64_t>(kMaxFdsPerMessage)});
  fits(Blocks{std::vector<Block>(kMaxBlocksPerMessage)});
  fits(Published{std::vector<PublishedBlock>(kMaxBlocksPerPublish)});
  fits(Prefix{1, std::vector<Block>(kMaxBlocksPerMessage)});
  const std::string word = text(kMaxCapabilityTextBytes);
  fits(Capabilities{std::vector<Capability>(kMaxCapabilities, {word, word, word, word, 1, 1})});
  const std::string name = text(kMaxNameBytes);
  SessionInfo session;
  session.tenant = session.role = session.client_name = name;
  session.fence = text(kMaxFenceBytes);
  fits(Sessions{std::vector<SessionInfo>(kMaxSessionsPerPage, session), true});
  DaemonStatus status;
  status.version = status.backend = name;
  status.not_ready = text(kMaxErrorBytes);
  fits(status);
  fits(Tenants{std::vector<TenantInfo>(kMaxTenants, {name, 1, 1, 1, 1, 1})});
  PoolOpened opened{1, true, std::vector<GroupLayout>(kMaxGroups)};
  for (GroupLayout& group : opened.groups)
    group.segment_bytes.resize(kMaxSegmentsPerPool / kMaxGroups);
  fits(opened);
}

TEST_CASE("the largest pool fits into a page of pools, and page_bytes tells how many do") {
  const std::string name = text(kMaxNameBytes);
  PoolInfo largest;
  largest.tenant = largest.name = largest.model = name;
  largest.identity.assign(kMaxIdentityFields, {name, text(kMaxIdentityValueBytes)});
  GroupInfo group;
  group.name = name;
  largest.groups.assign(kMaxGroups, group);
  CHECK(page_bytes(largest) <= kMaxPoolPageBytes);

  PoolInfo usual;
  usual.tenant = "tenant";
  usual.identity.assign(20, {"k_format", "nvfp4"});
  usual.groups.resize(2);
  for (const PoolInfo& pool : {largest, usual, PoolInfo{}}) {
    Pools page;
    page.more = true;
    for (size_t sum = page_bytes(pool); sum <= kMaxPoolPageBytes && page.pools.size() < kMaxPools;
         sum += page_bytes(pool))
      page.pools.push_back(pool);
    CAPTURE(page.pools.size());
    const size_t num_pools = page.pools.size();
    const Bytes bytes = encode(Reply{1, 2, std::move(page)});
    check_fits(bytes);
    CHECK(bytes.size() >= num_pools * page_bytes(pool));
    check_accepted(decode_reply(bytes).status());
  }
}

TEST_CASE("the largest command and report of each kind fits into a message") {
  const std::string name = text(kMaxNameBytes);
  AddGroup add{1, 0, {}, {}};
  AttentionGroup attention;
  attention.k_format = attention.v_format = attention.encoder = attention.key_transform = name;
  attention.k_scales.resize(kMaxLayers);
  attention.v_scales.resize(kMaxLayers);
  add.spec.name = add.spec.layout = name;
  add.spec.layer_aliases.resize(kMaxLayers);
  add.spec.kind = attention;
  add.layout.segment_bytes.resize(kMaxSegmentsPerGroup);
  const std::vector<int32_t> blocks(kMaxBlocksPerCopy);
  for (const ExecutorCommand& command :
       {ExecutorCommand(add), ExecutorCommand(CopyBlocks{1, 1, 0, blocks, blocks}),
        ExecutorCommand(AddSegments{1, 0, std::vector<int64_t>(kMaxFdsPerMessage)})}) {
    const Bytes bytes = encode(command);
    check_fits(bytes);
    check_accepted(decode_command(bytes).status());
  }
  for (const ExecutorReport& report :
       {ExecutorReport(BrokenRing{1, text(2 * kMaxErrorBytes)}),
        ExecutorReport(Copied{1, Status(ErrorCode::kInternal, text(2 * kMaxErrorBytes))})}) {
    const Bytes bytes = encode(report);
    check_fits(bytes);
    check_accepted(decode_report(bytes).status());
  }
}

TEST_CASE("a request of exactly the largest size is served, one of eight bytes more is not") {
  Lookup body{1, "", std::vector<int32_t>(kMaxTokensInline), {}, true, 0};
  const auto size = [&] { return encode(Request{5, 0, body}).size(); };
  for (size_t left = kMaxMessageBytes - size(); left > 0;) {
    size_t entry = std::min<size_t>(left, 8 + kMaxExtraBytesPerBlock);  // a pointer and its bytes
    if (left - entry == 8) entry -= 8;
    body.extra.push_back(text(entry - 8));
    left -= entry;
  }
  const Bytes bytes = encode(Request{5, 0, body});
  CHECK(bytes.size() == kMaxMessageBytes);
  check_accepted(decode_request(bytes).request.status());

  body.extra.back() = text(body.extra.back().size() + 1);
  const Bytes longer = encode(Request{5, 0, body});
  CHECK(longer.size() == kMaxMessageBytes + 8);
  const Status status = decode_request(longer).request.status();
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().starts_with("a message of " + std::to_string(kMaxMessageBytes + 8)));
  CHECK(status.message().find(std::to_string(kMaxMessageBytes)) != std::string::npos);
}

}  // namespace
}  // namespace larder::protocol
