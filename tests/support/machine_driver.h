// A state machine as tests drive it: requests by value, replies by type, segments made at once
// unless a test wants to make them itself, and the figures recounted after every event.
#pragma once

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

#include "allocator/state_machine.h"

namespace larder::test {

template <typename T>
std::vector<T> effects_of(const Effects& effects) {
  std::vector<T> found;
  for (const Effect& effect : effects)
    if (const T* specific = std::get_if<T>(&effect)) found.push_back(*specific);
  return found;
}

inline PoolSpec small_pool(int64_t num_blocks, int32_t block_tokens = 4) {
  return {"pool",
          "model@1",
          {{"k_format", "nvfp4"}, {"layers", "36"}},
          {{"main", 18432, num_blocks, block_tokens}}};
}

// A pool that grows by extents of 4 blocks of 1 MiB.
inline PoolSpec growing_pool(int64_t num_blocks, int64_t max_blocks, int32_t block_tokens = 4) {
  PoolSpec spec{"pool", "model@1", {}, {{"main", int64_t{1} << 20, num_blocks, block_tokens}}};
  spec.groups[0].max_blocks = max_blocks;
  spec.groups[0].segment_bytes = int64_t{4} << 20;
  return spec;
}

inline Configure two_tenants(int64_t memory_bytes, size_t max_pools = 1024) {
  return {memory_bytes, max_pools, {{"a", "salt of a"}, {"b", "salt of b"}}};
}

inline std::vector<std::byte> saved(const StateMachine& machine) {
  ByteWriter out;
  machine.save(out);
  return {out.bytes().begin(), out.bytes().end()};
}

class MachineDriver {
 public:
  explicit MachineDriver(int64_t memory_bytes = int64_t{1} << 40, size_t max_pools = 1024) {
    apply(two_tenants(memory_bytes, max_pools));
  }

  // What is journalled of every event makes the same state of the one before, and now and then
  // that state is saved and loaded.
  Effects apply(const Event& event) {
    Effects carried_out = machine.apply(event, now_us);
    machine.check_consistency();
    if (!machine.record().empty()) {
      const Status replayed = replica->replay(machine.record());
      REQUIRE_MESSAGE(replayed.ok(), replayed.to_string());
    }
    const std::vector<std::byte> state = saved(machine);
    REQUIRE(state == saved(*replica));
    if (++num_events_ % 8 == 0) {
      replica = std::make_unique<StateMachine>();
      const Status loaded = replica->load(state);
      REQUIRE_MESSAGE(loaded.ok(), loaded.to_string());
      REQUIRE(state == saved(*replica));
    }
    return carried_out;
  }

  // As apply, and makes the segments that are asked for.
  Effects settle(const Event& event) {
    Effects all = apply(event);
    for (size_t i = 0; i < all.size(); ++i) {
      const auto* create = std::get_if<CreateSegment>(&all[i]);
      if (create == nullptr) continue;
      for (Effect& effect : apply(SegmentCreated{create->segment, {}})) all.push_back(effect);
    }
    return all;
  }

  SessionId open_session(const std::string& tenant = "a", Role role = Role::kAppend) {
    const SessionId session{++last_session_};
    REQUIRE(apply(OpenSession{session, tenant, role}).empty());
    return session;
  }

  // The reply that one event brings at once.
  template <typename Request>
  ReplyBody ask(Request request) {
    request.request = ++last_request_;
    effects = apply(request);
    const auto replies = effects_of<Reply>(effects);
    REQUIRE(replies.size() == 1);
    REQUIRE(replies[0].request == last_request_);
    REQUIRE(std::holds_alternative<Reply>(effects.back()));
    return replies[0].body;
  }

  template <typename Body, typename Request>
  Body expect(const Request& request) {
    ReplyBody body = ask(request);
    if (const Status* status = std::get_if<Status>(&body)) FAIL(status->to_string());
    REQUIRE(std::holds_alternative<Body>(body));
    return std::get<Body>(body);
  }

  // The reply once the segments that the request asks for are there.
  template <typename Request>
  ReplyBody ask_and_settle(Request request) {
    request.request = ++last_request_;
    effects = settle(request);
    const auto replies = effects_of<Reply>(effects);
    REQUIRE(replies.size() == 1);
    REQUIRE(replies[0].request == last_request_);
    return replies[0].body;
  }

  // The request is refused, and nothing has changed.
  template <typename Request>
  Status refused(const Request& request) {
    const std::vector<std::byte> before = saved(machine);
    const ReplyBody body = ask(request);
    REQUIRE(std::holds_alternative<Status>(body));
    CHECK(saved(machine) == before);
    CHECK(machine.record().empty());
    CHECK(effects.size() == 1);
    return std::get<Status>(body);
  }

  // Opens a pool and makes its segments.
  PoolOpened open_pool(SessionId session, const PoolSpec& spec) {
    const auto replies = effects_of<Reply>(settle(OpenPool{++last_request_, session, spec}));
    REQUIRE(replies.size() == 1);
    if (const auto* status = std::get_if<Status>(&replies[0].body)) FAIL(status->to_string());
    return std::get<PoolOpened>(replies[0].body);
  }

  std::vector<BlockRef> allocate(SessionId session, PoolId pool, int64_t num_blocks) {
    return expect<BlocksAllocated>(Allocate{0, session, pool, 0, num_blocks}).blocks;
  }
  void release(SessionId session, PoolId pool, std::vector<BlockRef> blocks) {
    expect<Done>(Release{0, session, pool, 0, std::move(blocks)});
  }
  std::vector<BlockRef> publish(SessionId session, PoolId pool, std::vector<int32_t> tokens,
                                std::vector<BlockRef> blocks) {
    return expect<BlocksPublished>(
               Publish{0, session, pool, "", std::move(tokens), std::move(blocks), {}})
        .blocks;
  }
  PrefixFound look_up(SessionId session, PoolId pool, std::vector<int32_t> tokens,
                      bool hold = false) {
    return expect<PrefixFound>(Lookup{0, session, pool, "", std::move(tokens), {}, hold});
  }

  PoolStats pool_stats(PoolId pool) const {
    for (const PoolStats& stats : machine.pool_stats())
      if (stats.pool == pool) return stats;
    FAIL("no such pool");
    return {};
  }
  GroupStats group_stats(PoolId pool) const { return pool_stats(pool).groups.at(0); }
  SessionStats session_stats(SessionId session) const {
    for (const SessionStats& stats : machine.session_stats())
      if (stats.session == session) return stats;
    FAIL("no such session");
    return {};
  }

  // Everything that can be seen, except the counters of lookups.
  std::string snapshot() const {
    std::ostringstream text;
    text << machine.physical_bytes();
    for (const PoolStats& pool : machine.pool_stats()) {
      text << "\npool " << value(pool.pool) << ' ' << pool.creating << ' ' << pool.num_sessions
           << ' ' << pool.allocated_blocks_total << ' ' << pool.evicted_blocks_total << ' '
           << pool.published_blocks_total;
      for (const GroupStats& group : pool.groups)
        text << ' ' << group.free << ' ' << group.open << ' ' << group.published << ' '
             << group.cached << ' ' << group.quarantined;
      for (uint64_t word : machine.owner_words(pool.pool, 0)) text << ' ' << word;
    }
    for (const SessionStats& session : machine.session_stats())
      text << "\nsession " << value(session.session) << ' ' << session.num_pools << ' '
           << session.open_blocks << ' ' << session.holds;
    return text.str();
  }

  StateMachine machine;
  // Made of records and snapshots alone.
  std::unique_ptr<StateMachine> replica = std::make_unique<StateMachine>();
  int64_t now_us = 0;
  Effects effects;  // of the last request

 private:
  uint64_t num_events_ = 0;
  uint64_t last_session_ = 0;
  uint64_t last_request_ = 1'000'000;  // a test that numbers its own ones stays below
};

// The status has this code, and its sentence contains all of these.
inline void check_status(const Status& status, ErrorCode code,
                         const std::vector<std::string>& parts) {
  INFO(status.to_string());
  CHECK(status.code() == code);
  for (const std::string& part : parts)
    CHECK_MESSAGE(status.message().find(part) != std::string::npos, part);
}

}  // namespace larder::test
