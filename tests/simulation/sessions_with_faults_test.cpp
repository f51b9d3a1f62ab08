// Sessions of two tenants in a world that fails: sessions die at any moment, segments cannot be
// made, and what the world has to say comes late, twice or after everybody has gone.
//
// After every step the world's books (world_books.h) must agree with the machine, and no block may
// be handed out that somebody else can still write to.
#include <algorithm>

#include <doctest/doctest.h>

#include "tests/simulation/world_books.h"
#include "tests/support/machine_driver.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr int64_t kMemoryBytes = int64_t{1600} << 20;
constexpr int kMaxClients = 6;
constexpr int32_t kBlockTokens = 2;

class World : private WorldBooks {
 public:
  World(uint64_t stream, Tally& tally)
      : WorldBooks(kMemoryBytes, tally), random_(random_engine(stream)) {}

  void step() {
    now_us_ += below(3);
    if (below(8) == 0 || clients_.empty()) {
      change_sessions();
    } else if (below(3) == 0) {
      world_speaks();
    } else {
      request_something();
    }
    check();
  }

  // Everybody leaves and the world says all that it owes: nothing may be left.
  void drain() {
    while (!awaited_.empty()) make_segment(true);
    while (!copies_.empty()) finish_copy();
    while (!clients_.empty()) end_session(clients_.begin()->first, false);
    while (!fencing_.empty()) fence();
    for (const char* tenant : {"a", "b"}) {
      const SessionId admin = open_session(tenant, Role::kAdmin);
      for (const PoolStats& pool : machine_.pool_stats()) {
        if (pool.tenant != tenant) continue;
        const GroupStats& group = pool.groups[0];
        CHECK(group.free + group.cached == group.capacity);
        ask(DestroyPool{0, admin, pool.pool},
            [](const ReplyBody& body) { CHECK(std::holds_alternative<Done>(body)); });
      }
    }
    check();
    CHECK(requests_.empty());
    CHECK(segments_.empty());
    CHECK(machine_.physical_bytes() == 0);
  }

 private:
  int below(size_t limit) { return static_cast<int>(random_() % limit); }
  template <typename Container>
  auto pick(Container& from) {
    return std::next(from.begin(), below(from.size()));
  }

  // ------------------------------------------------------------------------------------ sessions

  SessionId open_session(const std::string& tenant, Role role) {
    const SessionId session{++last_session_};
    clients_[session].tenant = tenant;
    apply(OpenSession{session, tenant, role});
    return session;
  }

  void change_sessions() {
    if (clients_.size() < kMaxClients && below(2) == 0) {
      open_session(below(2) == 0 ? "a" : "b", static_cast<Role>(below(8) == 0 ? 0 : 1 + below(2)));
    } else if (!clients_.empty()) {
      end_session(pick(clients_)->first, below(3) == 0);
    }
  }

  void end_session(SessionId session, bool fenced) {
    clients_.erase(session);
    std::erase_if(requests_, [&](const auto& r) { return r.second.session == session; });
    if (fenced) forget_writer(session);
    apply(CloseSession{session, fenced});
  }

  void forget_writer(SessionId session) {
    std::erase_if(writers_, [&](const auto& entry) { return entry.second == session; });
  }

  // ----------------------------------------------------------------------- what the world says

  void world_speaks() {
    switch (below(8)) {
      case 0:
      case 1:
      case 2:
        make_segment(below(6) != 0);
        break;
      case 3:
      case 4:
        finish_copy();
        break;
      case 5:
        fence();
        break;
      case 6:
        repeat_old_news();
        break;
      default:
        break;
    }
  }

  void make_segment(bool succeeds) {
    if (awaited_.empty()) return;
    const auto [segment, size_bytes] = *pick(awaited_);
    awaited_.erase(segment);
    if (succeeds) segments_.emplace(segment, size_bytes);
    const auto num_pools = machine_.pool_stats().size();
    apply(SegmentCreated{segment, succeeds ? Status() : Status(ErrorCode::kUnavailable, "no")});
    tally_.undone_creations += machine_.pool_stats().size() < num_pools ? 1 : 0;
    said_.push_back(
        SegmentCreated{segment, below(2) == 0 ? Status() : Status(ErrorCode::kInternal, "late")});
  }

  void finish_copy() {
    if (copies_.empty()) return;
    const uint64_t copy = pick(copies_)->first;
    copies_.erase(copy);
    const CopyDone done{copy, below(4) != 0 ? Status() : Status(ErrorCode::kUnavailable, "gone")};
    apply(done);
    said_.push_back(done);
  }

  void fence() {
    if (fencing_.empty()) return;
    const SessionId session = *pick(fencing_);
    fencing_.erase(session);
    forget_writer(session);
    apply(SessionFenced{session});
    said_.push_back(SessionFenced{session});
    said_.push_back(CloseSession{session, true});
  }

  void repeat_old_news() {
    if (said_.empty()) return;
    const auto before = machine_.physical_bytes();
    REQUIRE(machine_.apply(*pick(said_), now_us_).empty());
    REQUIRE(machine_.physical_bytes() == before);
  }

  // ---------------------------------------------------------------------------------- requests

  void request_something() {
    const auto [session, client] = *pick(clients_);
    if (client.pools.empty() || below(20) == 0) return open_pool(session);
    const PoolId pool = *pick(client.pools);
    switch (below(20)) {
      case 0:
        return close_pool(session, pool);
      case 1:
        return destroy_pool(session, pool);
      case 2:
      case 3:
        return copy(session, pool);
      case 4:
      case 5:
      case 6:
      case 7:
        return release(session, pool);
      case 8:
      case 9:
      case 10:
      case 11:
        return publish(session, pool);
      case 12:
      case 13:
      case 14:
        return look_up(session, pool);
      default:
        return allocate(session, pool);
    }
  }

  void open_pool(SessionId session) {
    // Sizes such that pools have one to six segments and not all of them fit at a time.
    PoolSpec spec = small_pool(16, kBlockTokens);
    GroupSpec& group = spec.groups[0];
    switch (below(4)) {
      case 0:
        spec.name = "small";
        break;
      case 1:
        spec.name = "changing", group.num_blocks = below(8) == 0 ? 17 : 12;
        break;
      case 2:
        spec.name = "large", group.block_bytes = 16 << 20;
        break;
      default:
        spec.name = "many segments", group.block_bytes = 96 << 20, group.num_blocks = 12;
    }
    ask(OpenPool{0, session, spec}, [this, session](const ReplyBody& body) {
      if (const auto* opened = std::get_if<PoolOpened>(&body))
        clients_[session].pools.insert(opened->pool);
    });
  }

  void close_pool(SessionId session, PoolId pool) {
    ask(ClosePool{0, session, pool}, [=, this](const ReplyBody& body) {
      if (!std::holds_alternative<Done>(body)) return;
      clients_[session].pools.erase(pool);
      clients_[session].open.erase(pool);
      clients_[session].holds.erase(pool);
      std::erase_if(writers_, [&](const auto& entry) {
        return entry.first.first == pool && entry.second == session;
      });
    });
  }

  void destroy_pool(SessionId session, PoolId pool) {
    ask(DestroyPool{0, session, pool}, [](const ReplyBody&) {});
  }

  void allocate(SessionId session, PoolId pool) {
    ask(Allocate{0, session, pool, 0, 1 + below(4)}, [=, this](const ReplyBody& body) {
      const auto* allocated = std::get_if<BlocksAllocated>(&body);
      if (allocated == nullptr) return;
      for (const BlockRef& block : allocated->blocks) {
        REQUIRE(!in_running_copy(pool, block.id));
        REQUIRE(writers_.emplace(BlockName{pool, block.id}, session).second);
        clients_[session].open[pool].push_back(block);
      }
    });
  }

  bool in_running_copy(PoolId pool, int32_t block) const {
    return std::any_of(copies_.begin(), copies_.end(), [&](const auto& entry) {
      const RunCopy& run = entry.second;
      return run.pool == pool && (std::count(run.from.begin(), run.from.end(), block) > 0 ||
                                  std::count(run.to.begin(), run.to.end(), block) > 0);
    });
  }

  void release(SessionId session, PoolId pool) {
    const bool open = below(2) == 0;
    auto& list = open ? clients_[session].open[pool] : clients_[session].holds[pool];
    if (list.empty()) return;
    const BlockRef block = *pick(list);
    ask(Release{0, session, pool, 0, {block}}, [=, this](const ReplyBody& body) {
      if (!std::holds_alternative<Done>(body)) return;
      auto& from = open ? clients_[session].open[pool] : clients_[session].holds[pool];
      from.erase(std::find(from.begin(), from.end(), block));
      if (open) writers_.erase({pool, block.id});
    });
  }

  void publish(SessionId session, PoolId pool) {
    std::vector<BlockRef> blocks = clients_[session].open[pool];
    blocks.resize(std::min<size_t>(blocks.size(), below(4)));
    std::vector<int32_t> tokens(blocks.size() * kBlockTokens + below(2), 0);
    for (int32_t& token : tokens) token = below(8) == 0 ? 1 : 0;
    ask(Publish{0, session, pool, "", tokens, blocks, {}}, [=, this](const ReplyBody& body) {
      const auto* published = std::get_if<BlocksPublished>(&body);
      if (published == nullptr) return;
      for (size_t i = 0; i < blocks.size(); ++i) {
        clients_[session].holds[pool].push_back(published->blocks[i]);
        if (published->blocks[i] != blocks[i]) continue;
        std::erase(clients_[session].open[pool], blocks[i]);
        writers_.erase({pool, blocks[i].id});
      }
    });
  }

  void look_up(SessionId session, PoolId pool) {
    std::vector<int32_t> tokens(below(8), 0);
    for (int32_t& token : tokens) token = below(8) == 0 ? 1 : 0;
    const bool hold = below(2) == 0;
    ask(Lookup{0, session, pool, "", tokens, {}, hold}, [=, this](const ReplyBody& body) {
      for (const BlockRef& block : std::get<PrefixFound>(body).blocks) {
        REQUIRE(!writers_.contains({pool, block.id}));
        if (hold) clients_[session].holds[pool].push_back(block);
      }
    });
  }

  void copy(SessionId session, PoolId pool) {
    const auto& open = clients_[session].open[pool];
    const auto& holds = clients_[session].holds[pool];
    if (open.empty()) return;
    const BlockRef to = open[below(open.size())];
    const BlockRef from = holds.empty() ? open[below(open.size())] : holds[below(holds.size())];
    ask(Copy{0, session, pool, 0, {from}, {to}}, [](const ReplyBody&) {});
  }

  std::mt19937_64 random_;
  std::vector<Event> said_;  // news of the past, true or false by now
};

TEST_CASE("nothing is lost, leaked or handed out twice, whoever dies and whatever fails") {
  INFO("seed " << seed());
  Tally tally;
  for (uint64_t run = 0; run < 20; ++run) {
    World world(run, tally);
    for (int i = 0; i < 1500; ++i) {
      CAPTURE(run);
      CAPTURE(i);
      world.step();
    }
    world.drain();
  }
  for (size_t kind = 0; kind < tally.effects.size(); ++kind) {
    CAPTURE(kind);
    CHECK(tally.effects[kind] >= 20);
  }
  CHECK(tally.undone_creations >= 5);
  for (const ErrorCode code : {ErrorCode::kInvalidArgument, ErrorCode::kResourceExhausted,
                               ErrorCode::kPermissionDenied, ErrorCode::kBusy})
    CHECK_MESSAGE(tally.refusals[static_cast<size_t>(code)] >= 20, error_code_name(code));
}

}  // namespace
}  // namespace larder::test
