// Random operations of a few sessions on one small pool, compared with the naive model after every
// step: answers, states, words, and who holds how much.
#include <algorithm>
#include <map>

#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"
#include "tests/support/pool_model.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr int32_t kNumBlocks = 20;
constexpr int32_t kBlockTokens = 2;
constexpr int kNumClients = 4;

class RandomOperations {
 public:
  RandomOperations(uint64_t stream, bool reserve_block_zero)
      : random_(random_engine(stream)),
        spec_(small_pool(kNumBlocks, kBlockTokens)),
        model_(kNumBlocks, reserve_block_zero, kBlockTokens) {
    spec_.groups[0].reserve_block_zero = reserve_block_zero;
    for (int i = 0; i < kNumClients; ++i) clients_.push_back(new_client());
  }

  void step() {
    driver_.now_us += below(3);  // equal times happen
    const int client = below(kNumClients);
    switch (below(16)) {
      case 0:
      case 1:
      case 2:
        allocate(client);
        break;
      case 3:
      case 4:
      case 5:
        release(client);
        break;
      case 6:
      case 7:
      case 8:
        publish(client);
        break;
      case 9:
      case 10:
      case 11:
        look_up(client);
        break;
      case 12:
        copy(client);
        break;
      case 13:
        finish_copy();
        break;
      case 14:
        if (below(6) == 0) close_session(client);
        break;
      case 15:
        below(8) == 0 ? close_pool(client) : fence();
        break;
    }
    compare();
  }

  void drain() {
    while (!copies_.empty()) finish_copy();
    for (SessionId& client : clients_) {
      driver_.apply(CloseSession{client, FenceClass::kFenced});
      model_.end_session(client, true, driver_.now_us);
    }
    while (!fencing_.empty()) fence();
    const GroupStats stats = driver_.group_stats(pool_);
    CHECK(stats.free + stats.cached == stats.capacity);
  }

 private:
  using Tokens = PoolModel::Tokens;
  using Blocks = PoolModel::Blocks;

  int below(int limit) { return static_cast<int>(random_() % static_cast<uint64_t>(limit)); }

  SessionId new_client() {
    const SessionId session = driver_.open_session();
    pool_ = driver_.open_pool(session, spec_).pool;
    return session;
  }

  // Few tokens, so that prefixes meet.
  Tokens random_tokens() {
    Tokens tokens(below(5 * kBlockTokens + 1));
    for (int32_t& token : tokens) token = below(8) == 0 ? 1 : 0;
    return tokens;
  }

  // Some of what the client holds, now and then spoilt.
  Blocks some_blocks(int client) {
    Blocks held = model_.held_by(clients_[client]);
    std::shuffle(held.begin(), held.end(), random_);
    held.resize(std::min<size_t>(held.size(), below(5)));
    if (below(12) == 0)
      held.push_back({below(kNumBlocks + 4) - 2, static_cast<uint32_t>(below(4))});
    if (below(12) == 0 && !held.empty()) held.push_back(held[0]);
    return held;
  }

  // Publishes what a client would: what it holds of the prefix already, then open blocks.
  Blocks blocks_for(int client, const Tokens& tokens, int64_t first_block) {
    if (below(8) == 0) return some_blocks(client);
    Blocks blocks, open;
    for (const BlockRef& block : model_.held_by(clients_[client]))
      if (model_.state(block.id) == BlockState::kOpen) open.push_back(block);
    for (int64_t i = first_block; (i + 1) * kBlockTokens <= std::ssize(tokens); ++i) {
      const Tokens prefix(tokens.begin(), tokens.begin() + (i + 1) * kBlockTokens);
      BlockRef next;
      for (const BlockRef& block : model_.held_by(clients_[client]))
        if (model_.state(block.id) == BlockState::kPublished && model_.prefix(block.id) == prefix)
          next = block;
      if (next.id < 0 || below(8) == 0) {
        if (open.empty()) break;
        next = open.back();
        open.pop_back();
      }
      blocks.push_back(next);
    }
    return blocks;
  }

  // The machine's reply in the model's words.
  static PoolModel::Answer answer_of(const ReplyBody& body) {
    if (const auto* status = std::get_if<Status>(&body)) return {status->code(), {}};
    if (const auto* reply = std::get_if<BlocksAllocated>(&body)) return {{}, reply->blocks};
    if (const auto* reply = std::get_if<BlocksPublished>(&body)) return {{}, reply->blocks};
    if (const auto* reply = std::get_if<PrefixFound>(&body)) {
      CHECK(reply->hit_tokens == std::ssize(reply->blocks) * kBlockTokens);
      return {{}, reply->blocks};
    }
    return {};
  }
  void check(const ReplyBody& body, const PoolModel::Answer& expected) {
    const PoolModel::Answer answer = answer_of(body);
    REQUIRE(error_code_name(answer.code) == error_code_name(expected.code));
    REQUIRE(answer.blocks == expected.blocks);
  }

  void allocate(int client) {
    const int num_blocks = below(8);
    const auto expected = model_.allocate(clients_[client], num_blocks);
    check(driver_.ask(Allocate{0, clients_[client], pool_, 0, num_blocks}), expected);
  }
  void release(int client) {
    const Blocks blocks = some_blocks(client);
    const auto expected = model_.release(clients_[client], blocks, driver_.now_us);
    check(driver_.ask(Release{0, clients_[client], pool_, 0, blocks}), expected);
  }
  // Usually 0, as of a client that has only one portion to send.
  int64_t first_block() { return below(4) == 0 ? below(4) : 0; }
  void publish(int client) {
    const Tokens tokens = random_tokens();
    const int64_t first = first_block();
    const Blocks blocks = blocks_for(client, tokens, first);
    const auto expected = model_.publish(clients_[client], tokens, first, blocks, driver_.now_us);
    check(driver_.ask(Publish{0, clients_[client], pool_, "", tokens, blocks, {}, first}),
          expected);
  }
  void look_up(int client) {
    const Tokens tokens = random_tokens();
    const bool hold = below(2) == 0;
    const int64_t first = first_block();
    const int64_t most = below(4) == 0 ? below(3) : kNumBlocks;
    const auto expected =
        model_.lookup(clients_[client], tokens, first, most, hold, driver_.now_us);
    check(driver_.ask(Lookup{0, clients_[client], pool_, "", tokens, {}, hold, first, most}),
          expected);
  }
  void copy(int client) {
    const Blocks from = some_blocks(client);
    Blocks to = some_blocks(client);
    if (below(8) != 0) to.resize(std::min(from.size(), to.size()));
    const uint64_t number = last_copy_ + 1;
    const auto expected = model_.begin_copy(number, clients_[client], from, to);
    const Effects effects =
        driver_.apply(Copy{++num_copies_, clients_[client], pool_, 0, from, to});
    REQUIRE(effects.size() == 1);
    if (const auto* run = std::get_if<RunCopy>(&effects[0])) {
      REQUIRE(run->copy == number);
      REQUIRE(expected.code == ErrorCode::kOk);
      last_copy_ = number;
      copies_.push_back(number);
    } else {
      check(std::get<Reply>(effects[0]).body, expected);
    }
  }
  void finish_copy() {
    if (copies_.empty()) return;
    const size_t i = below(static_cast<int>(copies_.size()));
    model_.end_copy(copies_[i]);
    driver_.apply(CopyDone{copies_[i], {}});
    copies_.erase(copies_.begin() + static_cast<int64_t>(i));
  }
  void close_session(int client) {
    const SessionId session = clients_[client];
    const bool fenced = below(2) == 0;
    model_.end_session(session, fenced, driver_.now_us);
    const Effects effects =
        driver_.apply(CloseSession{session, fenced ? FenceClass::kFenced : FenceClass::kPidfd});
    const auto fences = effects_of<FenceSession>(effects);
    REQUIRE(fences.size() == (fenced ? 0 : 1));
    if (!fenced) fencing_.push_back(session);
    clients_[client] = new_client();
  }
  void close_pool(int client) {
    const auto expected = model_.leave(clients_[client], driver_.now_us);
    check(driver_.ask(ClosePool{0, clients_[client], pool_}), expected);
    driver_.open_pool(clients_[client], spec_);
  }
  void fence() {
    if (fencing_.empty()) return;
    model_.fenced(fencing_.back());
    driver_.apply(SessionFenced{fencing_.back()});
    fencing_.pop_back();
  }

  void compare() {
    const GroupStats stats = driver_.group_stats(pool_);
    REQUIRE(stats.free == model_.count(BlockState::kFree));
    REQUIRE(stats.open == model_.count(BlockState::kOpen));
    REQUIRE(stats.published == model_.count(BlockState::kPublished));
    REQUIRE(stats.cached == model_.count(BlockState::kCached));
    REQUIRE(stats.quarantined == model_.count(BlockState::kQuarantined));
    REQUIRE(driver_.machine.owner_words(pool_, 0) == model_.words());
    for (SessionId client : clients_) {
      REQUIRE(driver_.session_stats(client).open_blocks == model_.open_blocks(client));
      REQUIRE(driver_.session_stats(client).holds == model_.holds(client));
    }
  }

  std::mt19937_64 random_;
  PoolSpec spec_;
  PoolModel model_;
  MachineDriver driver_;
  PoolId pool_{};
  std::vector<SessionId> clients_;
  std::vector<SessionId> fencing_;  // closed, and somebody has to say that they are fenced
  std::vector<uint64_t> copies_;    // running
  uint64_t last_copy_ = 0;
  uint64_t num_copies_ = 0;  // asked for
};

TEST_CASE("random operations agree with the naive model at every step") {
  INFO("seed " << seed());
  for (uint64_t run = 0; run < 10; ++run) {
    RandomOperations operations(100 + run, run % 2 == 1);
    for (int i = 0; i < 3000; ++i) {
      CAPTURE(run);
      CAPTURE(i);
      operations.step();
    }
    operations.drain();
  }
}

}  // namespace
}  // namespace larder::test
