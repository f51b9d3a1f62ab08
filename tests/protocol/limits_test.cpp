// Every limit: exactly at it is accepted, one past it is refused with the field and the numbers.
#include "protocol/limits.h"

#include <algorithm>
#include <string>

#include <doctest/doctest.h>

#include "protocol/executor_messages.h"
#include "protocol/messages.h"

namespace larder::protocol {
namespace {

Status status_of(const Request& request) {
  return decode_request(encode(request)).request.status();
}
Status status_of(RequestBody body) { return status_of(Request{1, 0, std::move(body)}); }
Status status_of_reply(ReplyBody body) {
  return decode_reply(encode(Reply{1, 2, std::move(body)})).status();
}
Status status_of_command(ExecutorCommand body) { return decode_command(encode(body)).status(); }
Status status_of_report(ExecutorReport body) { return decode_report(encode(body)).status(); }

void check_refused(const Status& status, const std::string& field, int64_t value, int64_t limit) {
  CAPTURE(status.to_string());
  CAPTURE(field);
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().starts_with(field + " "));
  CHECK(status.message().find(std::to_string(value)) != std::string::npos);
  CHECK(status.message().find(std::to_string(limit)) != std::string::npos);
}

void check_accepted(const Status& status) {
  CAPTURE(status.to_string());
  CHECK(status.ok());
}

// `status_for(n)` sends n of something.
template <typename StatusFor>
void check_limit(const std::string& field, size_t limit, StatusFor status_for) {
  check_accepted(status_for(limit));
  check_refused(status_for(limit + 1), field, static_cast<int64_t>(limit + 1),
                static_cast<int64_t>(limit));
}

std::string text(size_t size) { return std::string(size, 'n'); }

Request open_pool(GroupSpec group) {
  return Request{1, 0, OpenPool{{"p", "m", {std::move(group)}}}};
}
Request open_pool(AttentionGroup attention) {
  GroupSpec group;
  group.kind = std::move(attention);
  return open_pool(std::move(group));
}

TEST_CASE("names have at most 128 bytes") {
  const auto limited = [](const std::string& field, auto status_for) {
    check_limit(field, kMaxNameBytes, [&](size_t n) { return status_for(text(n)); });
  };
  limited("tenant", [](auto s) { return status_of(Connect{1, 1, s, "", "", "", 0}); });
  limited("token", [](auto s) { return status_of(Connect{1, 1, "", s, "", "", 0}); });
  limited("role", [](auto s) { return status_of(Connect{1, 1, "", "", s, "", 0}); });
  limited("client_name", [](auto s) { return status_of(Connect{1, 1, "", "", "", s, 0}); });
  limited("pool.name", [](auto s) { return status_of(OpenPool{{s, "", {}}}); });
  limited("model", [](auto s) { return status_of(OpenPool{{"", s, {}}}); });
  const auto in_group = [](std::string GroupSpec::*field) {
    return [field](std::string value) {
      GroupSpec group;
      group.*field = std::move(value);
      return status_of(open_pool(std::move(group)));
    };
  };
  limited("group.name", in_group(&GroupSpec::name));
  limited("layout", in_group(&GroupSpec::layout));
  const auto in_attention = [](std::string AttentionGroup::*field) {
    return [field](std::string value) {
      AttentionGroup group;
      group.*field = std::move(value);
      return status_of(open_pool(std::move(group)));
    };
  };
  limited("k_format", in_attention(&AttentionGroup::k_format));
  limited("v_format", in_attention(&AttentionGroup::v_format));
  limited("encoder", in_attention(&AttentionGroup::encoder));
  limited("key_transform", in_attention(&AttentionGroup::key_transform));
  limited("row_format", [](auto s) {
    GroupSpec group;
    group.kind = MlaGroup{1, s, {}};
    return status_of(open_pool(group));
  });
  limited("adapter", [](auto s) { return status_of(Publish{1, s, {}, {}, {}, 0}); });
  limited("adapter", [](auto s) { return status_of(Lookup{1, s, {}, {}, false, 0}); });
  limited("version", [](auto s) {
    DaemonStatus d;
    d.version = s;
    return status_of_reply(d);
  });
  limited("identity.name", [](auto s) {
    PoolInfo p;
    p.identity = {{s, ""}};
    return status_of_reply(Pools{{p}, false});
  });
}

TEST_CASE("other texts have limits of their own") {
  check_limit("identity.value", kMaxIdentityValueBytes, [](size_t n) {
    PoolInfo pool;
    pool.identity = {{"name", text(n)}};
    return status_of_reply(Pools{{pool}, false});
  });
  check_limit("capability.op", kMaxCapabilityTextBytes, [](size_t n) {
    return status_of_reply(Capabilities{{{text(n), "", "", "", 1, 1}}});
  });
  check_limit("extra", kMaxExtraBytesPerBlock, [](size_t n) {
    return status_of(Lookup{1, "", {}, {text(n)}, false, 0});
  });
}

TEST_CASE("a name that is not printable text is refused") {
  for (const char* bad : {"a\nb", "\x7f", "\xff", "\xc3", "\xc2\x9b"}) {
    CAPTURE(bad);
    const Status status = status_of(Connect{1, 1, bad, "", "", "", 0});
    CHECK(status.to_string() == "INVALID_ARGUMENT: tenant has a control character or is not UTF-8");
  }
}

TEST_CASE("lists of requests have limits") {
  const auto blocks = [](size_t n) { return std::vector<Block>(n); };
  check_limit("groups", kMaxGroups, [](size_t n) {
    return status_of(OpenPool{{"", "", std::vector<GroupSpec>(n)}});
  });
  check_limit("layer_aliases", kMaxLayers, [](size_t n) {
    GroupSpec group;
    group.layer_aliases.resize(n);
    return status_of(open_pool(group));
  });
  check_limit("k_scales", kMaxLayers, [](size_t n) {
    AttentionGroup group;
    group.k_scales.resize(n);
    return status_of(open_pool(group));
  });
  check_limit("v_scales", kMaxLayers, [](size_t n) {
    AttentionGroup group;
    group.v_scales.resize(n);
    return status_of(open_pool(group));
  });
  check_limit("blocks", kMaxBlocksPerMessage, [&](size_t n) {
    return status_of(Release{1, 0, blocks(n)});
  });
  check_limit("blocks", kMaxBlocksPerPublish, [&](size_t n) {
    return status_of(Publish{1, "", {}, blocks(n), {}, 0});
  });
  check_limit("tokens", kMaxTokensInline, [](size_t n) {
    return status_of(Lookup{1, "", std::vector<int32_t>(n), {}, false, 0});
  });
  check_limit("tokens", kMaxTokensInArena, [](size_t n) {
    return status_of(Lookup{1, "", ArenaRange{0, n}, {}, false, 0});
  });
  check_limit("extra", kMaxBlocksPerMessage, [](size_t n) {
    return status_of(Lookup{1, "", {}, std::vector<std::string>(n), false, 0});
  });
  check_limit("from", kMaxBlocksPerCopy, [&](size_t n) {
    return status_of(Copy{1, 0, blocks(n), blocks(n)});
  });
  check_refused(status_of(Copy{1, 0, blocks(3), blocks(2)}), "from", 3, 2);
}

TEST_CASE("lists of replies have limits") {
  check_limit("segments", kMaxFdsPerMessage,
              [](size_t n) { return status_of_reply(Segments{std::vector<int64_t>(n)}); });
  check_limit("blocks", kMaxBlocksPerMessage,
              [](size_t n) { return status_of_reply(Blocks{std::vector<Block>(n)}); });
  check_limit("blocks", kMaxBlocksPerMessage, [](size_t n) {
    return status_of_reply(Prefix{0, std::vector<Block>(n)});
  });
  check_limit("published", kMaxBlocksPerPublish,
              [](size_t n) { return status_of_reply(Published{std::vector<PublishedBlock>(n)}); });
  check_limit("capabilities", kMaxCapabilities,
              [](size_t n) { return status_of_reply(Capabilities{std::vector<Capability>(n)}); });
  check_limit("sessions", kMaxSessionsPerPage, [](size_t n) {
    return status_of_reply(Sessions{std::vector<SessionInfo>(n), true});
  });
  check_limit("identity", kMaxIdentityFields, [](size_t n) {
    PoolInfo pool;
    pool.identity.resize(n);
    return status_of_reply(Pools{{pool}, true});
  });
  check_limit("groups", kMaxGroups, [](size_t n) {
    PoolInfo pool;
    pool.groups.resize(n);
    return status_of_reply(Pools{{pool}, true});
  });
  check_limit("segment_bytes", kMaxSegmentsPerGroup, [](size_t n) {
    GroupLayout layout;
    layout.segment_bytes.resize(n);
    return status_of_reply(PoolOpened{1, true, {layout}});
  });
  check_limit("segment_bytes of all groups", kMaxSegmentsPerPool, [](size_t n) {
    PoolOpened body{1, true, std::vector<GroupLayout>(3)};
    body.groups[0].segment_bytes.resize(kMaxSegmentsPerGroup);
    body.groups[1].segment_bytes.resize(kMaxSegmentsPerGroup - 1);
    body.groups[2].segment_bytes.resize(n + 1 - 2 * kMaxSegmentsPerGroup);
    return status_of_reply(body);
  });
}

TEST_CASE("lists between larderd and the executor have limits") {
  check_limit("size_bytes", kMaxFdsPerMessage, [](size_t n) {
    return status_of_command(AddSegments{1, 0, std::vector<int64_t>(n)});
  });
  check_limit("from", kMaxBlocksPerCopy, [](size_t n) {
    return status_of_command(CopyBlocks{1, 1, 0, std::vector<int32_t>(n), std::vector<int32_t>(n)});
  });
  check_refused(status_of_command(CopyBlocks{1, 1, 0, {1, 2, 3}, {1, 2}}), "from", 3, 2);
  check_limit("counters", kMaxPools,
              [](size_t n) { return status_of_report(Counters{std::vector<PoolCounters>(n)}); });
}

TEST_CASE("numbers of requests have limits") {
  check_limit("deadline_us", kMaxDeadlineUs, [](size_t n) {
    return status_of(Request{1, n, Goodbye{}});
  });
  check_limit("count", kMaxFdsPerMessage, [](size_t n) {
    return status_of(OpenSegments{1, 0, 0, static_cast<uint32_t>(n)});
  });
  check_limit("num_blocks", kMaxBlocksPerMessage, [](size_t n) {
    return status_of(Allocate{1, 0, static_cast<int64_t>(n)});
  });
  check_refused(status_of(Allocate{1, 0, -1}), "num_blocks", -1, kMaxBlocksPerMessage);
  check_limit("first_block", kMaxTokensInArena, [](size_t n) {
    return status_of(Lookup{1, "", {}, {}, false, static_cast<int64_t>(n)});
  });
  check_refused(status_of(Publish{1, "", {}, {}, {}, -5}), "first_block", -5, 0);
  const auto arena = [](uint64_t n) { return Connect{1, 1, "", "", "", "", n}; };
  check_accepted(status_of(arena(0)));
  check_accepted(status_of(arena(kMinArenaBytes)));
  check_refused(status_of(arena(kMinArenaBytes - 1)), "arena_bytes", kMinArenaBytes - 1,
                kMinArenaBytes);
  check_limit("arena_bytes", kMaxArenaBytes, [&](size_t n) { return status_of(arena(n)); });
  check_refused(status_of_command(AddSession{1, 4096, {}}), "arena_bytes", 4096, kMinArenaBytes);
}

TEST_CASE("the id of a refused request is known") {
  const DecodedRequest decoded = decode_request(encode(Request{77, 0, Allocate{1, 0, -1}}));
  CHECK(decoded.id == 77);
  CHECK_FALSE(decoded.request.ok());
}

// ------------------------------------------------------------- what is within its limits also fits

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
  fits(Sessions{std::vector<SessionInfo>(kMaxSessionsPerPage, session), true});
  DaemonStatus status;
  status.version = status.backend = name;
  fits(status);
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
       {ExecutorReport(Counters{std::vector<PoolCounters>(kMaxPools)}),
        ExecutorReport(BrokenRing{1, text(2 * kMaxErrorBytes)}),
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
  check_refused(status, "a message of", kMaxMessageBytes + 8, kMaxMessageBytes);
}

}  // namespace
}  // namespace larder::protocol
