// The books of the simulated world: which process may still write to which block, which segments
// exist, what the ownership words are, which requests have no reply yet.
//
// They are kept from requests and effects alone and must agree with the machine's own figures. A
// second machine gets the same events and must say the same. What happens is decided elsewhere.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "allocator/state_machine.h"
#include "tests/support/effect_text.h"

namespace larder::test {

// How often what has happened: proof that the worlds are no quiet ones.
struct Tally {
  std::array<int, std::variant_size_v<Effect>> effects{};
  std::array<int, kNumErrorCodes> refusals{};
  int undone_creations = 0;
};

class WorldBooks {
 public:
  // The tally must outlive the books.
  WorldBooks(int64_t memory_bytes, Tally& tally)
      : config_{memory_bytes, {{"a", "salt of a"}, {"b", "salt of b"}}}, tally_(tally) {}

 protected:
  using BlockName = std::pair<PoolId, int32_t>;
  using OnReply = std::function<void(const ReplyBody&)>;
  struct Client {
    std::string tenant;
    std::set<PoolId> pools;
    std::map<PoolId, std::vector<BlockRef>> open;
    std::map<PoolId, std::vector<BlockRef>> holds;  // with multiplicity
  };
  struct Request {
    SessionId session;
    OnReply on_reply;
  };

  // --------------------------------------------------------------------- talking to the machine

  void apply(const Event& event) {
    const Effects effects = machine_.apply(event, now_us_);
    const Effects again = replica_.apply(event, now_us_);
    REQUIRE(effect_texts(effects) == effect_texts(again));
    for (const Effect& effect : effects) {
      ++tally_.effects[effect.index()];
      std::visit([this](const auto& specific) { carry_out(specific); }, effect);
    }
  }

  template <typename Event>
  void ask(Event event, OnReply on_reply) {
    event.request = ++last_request_;
    requests_.emplace(event.request, Request{event.session, std::move(on_reply)});
    apply(event);
  }

  void check() {
    machine_.check_consistency();
    int64_t physical_bytes = 0;
    for (const auto& [segment, size_bytes] : segments_) physical_bytes += size_bytes;
    for (const auto& [segment, size_bytes] : awaited_) physical_bytes += size_bytes;
    REQUIRE(machine_.physical_bytes() == physical_bytes);
    REQUIRE(physical_bytes <= config_.memory_bytes);
    for (const PoolStats& pool : machine_.pool_stats()) check_pool(pool);
    for (const SessionStats& session : machine_.session_stats()) check_session(session);
    for (const auto& [block, writer] : writers_) {
      const uint64_t word = words_.at(block.first).at(block.second);
      REQUIRE(word == (clients_.contains(writer) ? owner_word(OwnerState::kOpen, writer)
                                                 : owner_word(OwnerState::kNone)));
    }
    for (const auto& [number, request] : requests_) REQUIRE(clients_.contains(request.session));
  }

  const MachineConfig config_;
  Tally& tally_;
  StateMachine machine_{config_};
  StateMachine replica_{config_};
  int64_t now_us_ = 0;
  uint64_t last_session_ = 0;
  uint64_t last_request_ = 0;

  std::map<SessionId, Client> clients_;
  std::map<uint64_t, Request> requests_;           // without a reply, of living sessions
  std::map<BlockName, SessionId> writers_;         // who can write to a block, dead or alive
  std::map<SegmentId, int64_t> awaited_;           // being made
  std::map<SegmentId, int64_t> segments_;          // made and not dropped
  std::map<PoolId, std::vector<uint64_t>> words_;  // as SetOwnerWord has said
  std::map<uint64_t, RunCopy> copies_;
  std::set<SessionId> fencing_;

 private:
  void carry_out(const Reply& reply) {
    const auto found = requests_.find(reply.request);
    REQUIRE(found != requests_.end());  // one reply for each request
    const Request request = std::move(found->second);
    requests_.erase(found);
    REQUIRE(clients_.contains(request.session));
    if (const auto* status = std::get_if<Status>(&reply.body))
      ++tally_.refusals[static_cast<size_t>(status->code())];
    request.on_reply(reply.body);
  }
  void carry_out(const CreateSegment& create) {
    REQUIRE(awaited_.emplace(create.segment, create.size_bytes).second);
    // The words of a pool, before anybody has said anything about them.
    words_[create.pool] = machine_.owner_words(create.pool, create.group);
    for (uint64_t word : words_[create.pool]) REQUIRE(word == owner_word(OwnerState::kNone));
  }
  void carry_out(const DropSegment& drop) { REQUIRE(segments_.erase(drop.segment) == 1); }
  void carry_out(const PoolCreated& created) { REQUIRE(words_.contains(created.pool)); }
  void carry_out(const PoolDestroyed& destroyed) {
    REQUIRE(words_.erase(destroyed.pool) == 1);
    for (const auto& [session, client] : clients_) REQUIRE(!client.pools.contains(destroyed.pool));
    for (const auto& [block, writer] : writers_) REQUIRE(block.first != destroyed.pool);
  }
  void carry_out(const SetOwnerWord& set) {
    uint64_t& word = words_.at(set.pool).at(set.block);
    REQUIRE(word != set.word);
    word = set.word;
  }
  void carry_out(const RunCopy& run) { REQUIRE(copies_.emplace(run.copy, run).second); }
  void carry_out(const FenceSession& fence) { REQUIRE(fencing_.insert(fence.session).second); }

  void check_pool(const PoolStats& pool) {
    const GroupStats& group = pool.groups[0];
    REQUIRE(group.capacity ==
            group.free + group.open + group.published + group.cached + group.quarantined);
    REQUIRE(group.physical_bytes == group.used_bytes + group.slack_bytes);
    REQUIRE(machine_.owner_words(pool.pool, 0) == words_.at(pool.pool));
    int64_t open = 0;
    for (uint64_t word : words_.at(pool.pool)) {
      if ((word & 3) != static_cast<uint64_t>(OwnerState::kOpen)) continue;
      ++open;
      REQUIRE(clients_.contains(SessionId{word >> 2}));
    }
    REQUIRE(open == group.open);
  }

  void check_session(const SessionStats& stats) {
    const Client& client = clients_.at(stats.session);
    int64_t open = 0;
    int64_t holds = 0;
    for (const auto& [pool, blocks] : client.open) open += std::ssize(blocks);
    for (const auto& [pool, blocks] : client.holds) holds += std::ssize(blocks);
    REQUIRE(stats.open_blocks == open);
    REQUIRE(stats.holds == holds);
    REQUIRE(stats.num_pools == std::ssize(client.pools));
  }
};

}  // namespace larder::test
