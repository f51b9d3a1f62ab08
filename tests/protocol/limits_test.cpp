// Every limit: exactly at it is accepted, one past it is refused with the field and the numbers.
#include "protocol/limits.h"

#include <algorithm>
#include <string>

#include <doctest/doctest.h>

#include "protocol/executor_messages.h"
#include "protocol/messages.h"
#include "protocol/notices.h"

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
Status status_of_notice(Notice body) { return decode_notice(encode(body)).status(); }
Status status_of_ack(NoticeAck body) { return decode_notice_ack(encode(body)).status(); }

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
  limited("tenant", [](auto s) { return status_of(SetQuota{s, 0, 0}); });
  limited("tenant.name", [](auto s) { return status_of_reply(Tenants{{{s, 0, 0, 0, 0, 0}}}); });
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
  check_limit("fence", kMaxFenceBytes, [](size_t n) {
    SessionInfo session;
    session.fence = text(n);
    return status_of_reply(Sessions{{session}, false});
  });
  check_limit("not_ready", kMaxErrorBytes, [](size_t n) {
    DaemonStatus status;
    status.not_ready = text(n);
    return status_of_reply(status);
  });
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
  check_limit("tenants", kMaxTenants,
              [](size_t n) { return status_of_reply(Tenants{std::vector<TenantInfo>(n)}); });
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
}

TEST_CASE("numbers of requests have limits") {
  check_limit("deadline_us", kMaxDeadlineUs, [](size_t n) {
    return status_of(Request{1, n, Goodbye{}});
  });
  check_limit("answered_below", 77, [](size_t n) {
    return status_of(Request{77, 0, Goodbye{}, n});
  });
  check_refused(status_of(ResizePool{1, 0, -1}), "num_blocks", -1, INT64_MAX);
  check_refused(status_of(Evict{1, -1}), "num_blocks", -1, INT64_MAX);
  check_refused(status_of(SetQuota{"t", -1, 0}), "guaranteed_bytes", -1, INT64_MAX);
  check_refused(status_of(SetQuota{"t", 0, -1}), "maximum_bytes", -1, INT64_MAX);
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

TEST_CASE("what a notice and its acknowledgement name has limits") {
  check_limit("group", kMaxGroups - 1, [](size_t n) {
    return status_of_notice(Unmap{1, static_cast<uint32_t>(n), 0});
  });
  check_limit("index", kMaxSegmentsPerGroup - 1, [](size_t n) {
    return status_of_notice(Unmap{1, 0, static_cast<uint32_t>(n)});
  });
  check_limit("group", kMaxGroups - 1, [](size_t n) {
    return status_of_ack({1, static_cast<uint32_t>(n), 0});
  });
  check_limit("index", kMaxSegmentsPerGroup - 1, [](size_t n) {
    return status_of_ack({1, 0, static_cast<uint32_t>(n)});
  });
}

TEST_CASE("the id of a refused request is known") {
  const DecodedRequest decoded = decode_request(encode(Request{77, 0, Allocate{1, 0, -1}}));
  CHECK(decoded.id == 77);
  CHECK_FALSE(decoded.request.ok());
}

}  // namespace
}  // namespace larder::protocol
