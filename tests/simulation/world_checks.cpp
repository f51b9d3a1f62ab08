// What has to be true of the whole node after every step.
#include <algorithm>

#include "tests/simulation/violation.h"
#include "tests/simulation/workload.h"
#include "tests/simulation/world.h"

namespace larder::sim {
namespace {

// A machine in the same state, to which anything may be done.
std::unique_ptr<StateMachine> copy_of(const StateMachine& machine) {
  ByteWriter out;
  machine.save(out);
  auto copy = std::make_unique<StateMachine>();
  const Status status = copy->load(out.bytes());
  SIM_CHECK(status.ok(), status.to_string());
  return copy;
}

const SessionStats* stats_of(const std::vector<SessionStats>& all, SessionId id) {
  const auto found = std::ranges::find(all, id, &SessionStats::session);
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

void World::check() {
  if (!larderd_ || !larderd_->serving()) return;
  const auto every = static_cast<uint64_t>(scene_.options.check_every);
  if (scene_.coverage.num_events < checked_at_ + every) return;
  checked_at_ = scene_.coverage.num_events;
  larderd_->machine().check_consistency();
  larderd_->check_replica();
  scene_.books.check(larderd_->machine());
  compare_counts();
  if (checked_at_ < compared_at_ + every * 16) return;
  compared_at_ = checked_at_;
  compare_holds();
  probe_guarantees();
}

// What settled clients hold by their own books is what the machine says.
void World::compare_counts() const {
  const auto all = larderd_->machine().session_stats();
  for (const auto& client : scene_.clients) {
    if (!client->is_settled()) continue;
    const SessionStats* stats = stats_of(all, client->session());
    if (stats == nullptr) continue;  // larderd has ended it, and the client will see
    int64_t open = 0;
    int64_t holds = 0;
    for (const auto& [id, pool] : client->pools()) {
      for (uint32_t group = 0; group < pool.open.size(); ++group)
        for (const auto& [block, ref] : pool.open[group]) {
          ++open;
          SIM_CHECK(scene_.books.word({id, group, block}) ==
                        owner_word(OwnerState::kOpen, client->session()),
                    "an open block that is not", block, value(client->session()));
        }
      for (const HeldPrefix& prefix : pool.prefixes) holds += std::ssize(prefix.blocks);
      holds += std::ssize(pool.loose);
    }
    SIM_CHECK(stats->num_pools == std::ssize(client->pools()), stats->num_pools,
              client->pools().size());
    SIM_CHECK(stats->open_blocks == open, "open blocks", value(client->session()),
              stats->open_blocks, open);
    SIM_CHECK(stats->holds == holds, "holds", value(client->session()), stats->holds, holds);
  }
}

// Hold by hold, with generations: in a copy of the machine, each session can release exactly what
// it believes to hold, and then holds nothing. And what it holds has the content that it had.
void World::compare_holds() const {
  const std::unique_ptr<StateMachine> copy = copy_of(larderd_->machine());
  const auto before = copy->session_stats();
  uint64_t number = uint64_t{1} << 60;
  for (const auto& client : scene_.clients) {
    if (!client->is_settled() || stats_of(before, client->session()) == nullptr) continue;
    for (const auto& [id, pool] : client->pools()) {
      std::vector<std::vector<BlockRef>> held(pool.open.size());
      const auto add = [&, id = id](const HeldBlock& block) {
        held[block.group].push_back(block.ref);
        const uint64_t* content = scene_.books.content({id, block.group, block.ref.id});
        SIM_CHECK(content != nullptr && *content == block.content, "held content has changed",
                  block.ref.id, value(id));
      };
      for (const HeldPrefix& prefix : pool.prefixes)
        for (const HeldBlock& block : prefix.blocks) add(block);
      for (const HeldBlock& block : pool.loose) add(block);
      for (uint32_t group = 0; group < pool.open.size(); ++group) {
        for (const auto& [block, ref] : pool.open[group]) held[group].push_back(ref);
        if (held[group].empty()) continue;
        const Effects effects = copy->apply(
            Release{++number, client->session(), id, group, held[group]}, scene_.now_us);
        const auto reply = std::ranges::find_if(
            effects, [](const Effect& effect) { return std::holds_alternative<Reply>(effect); });
        SIM_CHECK(
            reply != effects.end() && std::holds_alternative<Done>(std::get<Reply>(*reply).body),
            "it does not hold what it believes to hold", value(client->session()));
      }
    }
    const auto after = copy->session_stats();
    const SessionStats* stats = stats_of(after, client->session());
    SIM_CHECK(stats->open_blocks == 0 && stats->holds == 0, "it holds more than it knows",
              value(client->session()), stats->open_blocks, stats->holds);
    ++scene_.coverage.checked_sessions;
  }
}

// Whatever others have taken: what a tenant is guaranteed and has not taken can be had at once.
void World::probe_guarantees() {
  constexpr int64_t kSegmentBytes = int64_t{2} << 20;
  const auto tenants = larderd_->machine().tenant_stats();
  int64_t kept = 0;
  for (const TenantStats& tenant : tenants)
    kept += std::max(tenant.guaranteed_bytes, tenant.used_bytes);
  // The operator has just guaranteed what others have taken already.
  if (kept > larderd_->machine().memory_bytes()) return;
  const TenantStats& tenant = *scene_.chance.pick(tenants);
  const int64_t segments = (tenant.guaranteed_bytes - tenant.used_bytes) / kSegmentBytes;
  if (segments <= 0 || larderd_->machine().pool_stats().size() >= configuration().max_pools) return;
  const std::unique_ptr<StateMachine> copy = copy_of(larderd_->machine());
  const SessionId session{copy->last_session() + 1};
  PoolSpec spec = pool_of_name("fixed");
  spec.name = "what is guaranteed";
  spec.groups[0].num_blocks = segments * kSegmentBytes / spec.groups[0].block_bytes;
  (void)copy->apply(OpenSession{session, tenant.name, Role::kAppend}, scene_.now_us);
  const Effects effects = copy->apply(OpenPool{1, session, spec}, scene_.now_us);
  const auto created = std::ranges::count_if(
      effects, [](const Effect& effect) { return std::holds_alternative<CreateSegment>(effect); });
  SIM_CHECK(created == segments, "a guarantee cannot be had", tenant.name, created, segments);
}

void World::check_drained() const {
  const StateMachine& machine = larderd_->machine();
  machine.check_consistency();
  larderd_->check_replica();
  scene_.books.check(machine);
  SIM_CHECK(machine.physical_bytes() == 0, machine.physical_bytes());
  SIM_CHECK(machine.pool_stats().empty() && machine.session_stats().empty(),
            machine.pool_stats().size(), machine.session_stats().size());
  SIM_CHECK(machine.segments().empty() && scene_.books.segments().empty(),
            machine.segments().size());
  SIM_CHECK(scene_.keeper.held().size() == 1 && scene_.keeper.holds(journal_key()),
            "the keeper holds more than the journal", scene_.keeper.held().size());
}

}  // namespace larder::sim
