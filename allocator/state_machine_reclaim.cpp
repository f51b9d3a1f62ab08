// How the state machine takes memory back from what is cached: of other tenants what is above their
// guarantee, and of other groups of the same tenant.
#include <algorithm>
#include <map>
#include <string>

#include "allocator/state_machine.h"

namespace larder {

// An extent that can be emptied by evicting `cost` cached blocks.
struct StateMachine::Candidate {
  int64_t cost;
  PoolId pool;
  uint32_t group;
  uint32_t index;
  int64_t size_bytes;
  const std::string* tenant;  // of the pool
};

std::vector<StateMachine::Candidate> StateMachine::candidates(const std::string& tenant,
                                                              GroupId except) const {
  std::vector<Candidate> all;
  const std::set<GroupId> waited_for = groups_waited_for();
  for (const auto& [id, pool] : pools_) {
    const TenantLedger::Tenant& owner = ledger_.at(pool.tenant);
    // What is not above its owner's guarantee stays reserved for the owner when it is given back.
    if (pool.tenant != tenant && owner.used_bytes <= owner.guaranteed_bytes) continue;
    for (uint32_t group = 0; group < pool.extents.size() && pool.created; ++group) {
      const GroupId group_id{id, group};
      if (!pool.layouts[group].grows() || group_id == except || waited_for.contains(group_id))
        continue;
      for (const auto& [cost, index] : emptyable_extents(pool, group))
        all.push_back(
            {cost, id, group, index, pool.extents[group].size_bytes(index), &pool.tenant});
    }
  }
  // The cheapest first; of equal ones the last, because blocks are handed out from the front.
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
    return a.cost != b.cost ? a.cost < b.cost : a.index > b.index;
  });
  return all;
}

// What somebody waits for stays where it is: two who want more than there is would otherwise take
// free extents from each other for ever.
std::set<StateMachine::GroupId> StateMachine::groups_waited_for() const {
  std::set<GroupId> groups;
  const auto add = [&groups](const Event& event) {
    if (const auto* allocate = std::get_if<Allocate>(&event))
      groups.insert({allocate->pool, allocate->group});
    if (const auto* resize = std::get_if<ResizePool>(&event))
      groups.insert({resize->pool, resize->group});
  };
  std::for_each(waiting_.begin(), waiting_.end(), add);
  std::for_each(to_serve_.begin(), to_serve_.end(), add);
  return groups;
}

std::vector<std::pair<int64_t, uint32_t>> StateMachine::emptyable_extents(const Pool& pool,
                                                                          uint32_t group) const {
  std::vector<std::pair<int64_t, uint32_t>> emptyable;
  const GroupExtents& extents = pool.extents[group];
  for (uint32_t i = pool.spec.groups[group].reserve_block_zero ? 1 : 0; i < extents.size(); ++i) {
    if (extents.at(i).state != ExtentState::kPresent) continue;
    const int64_t cost = pool.blocks.cost_of_emptying(group, i);
    if (cost >= 0) emptyable.emplace_back(cost, i);
  }
  return emptyable;
}

// What a tenant could take once what is planned has come back.
class StateMachine::Room {
 public:
  Room(const StateMachine& machine, const std::string& tenant)
      : ledger_(machine.ledger_), tenant_(tenant), room_(ledger_.memory_bytes()) {
    for (const auto& [name, entry] : ledger_.tenants()) {
      used_[name] = entry.used_bytes;
      room_ -= kept(name);
    }
    for (const auto& [segment, leaving] : machine.leaving_)
      comes_back(leaving.tenant, leaving.size_bytes);
  }
  void comes_back(const std::string& owner, int64_t bytes) {
    room_ += kept(owner);
    used_[owner] -= bytes;
    room_ -= kept(owner);
  }
  int64_t bytes() const {
    const int64_t maximum = ledger_.at(tenant_).maximum_bytes;
    return maximum > 0 ? std::min(room_, maximum - used_.at(tenant_)) : room_;
  }

 private:
  int64_t kept(const std::string& name) const {
    const int64_t used = used_.at(name);
    return name == tenant_ ? used : std::max(used, ledger_.at(name).guaranteed_bytes);
  }

  const TenantLedger& ledger_;
  const std::string& tenant_;
  std::map<std::string, int64_t> used_;
  int64_t room_;
};

bool StateMachine::can_reclaim(const std::string& tenant, int64_t bytes, GroupId except) const {
  Room room(*this, tenant);
  if (room.bytes() >= bytes) return true;
  for (const Candidate& candidate : candidates(tenant, except)) {
    room.comes_back(*candidate.tenant, candidate.size_bytes);
    if (room.bytes() >= bytes) return true;
  }
  return false;
}

void StateMachine::reclaim(const std::string& tenant, int64_t bytes, GroupId except) {
  std::vector<Candidate> chosen;
  if (!choices_.replaying()) {
    Room room(*this, tenant);
    for (const Candidate& candidate : candidates(tenant, except)) {
      const int64_t before = room.bytes();
      if (before >= bytes) break;
      room.comes_back(*candidate.tenant, candidate.size_bytes);
      if (room.bytes() > before) chosen.push_back(candidate);
    }
  }
  const int64_t count = choices_.choose([&] { return std::ssize(chosen); });
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t pool = choices_.choose([&] { return static_cast<int64_t>(chosen[at].pool); });
    const int64_t group = choices_.choose([&] { return int64_t{chosen[at].group}; });
    const int64_t index = choices_.choose([&] { return int64_t{chosen[at].index}; });
    const auto found = pools_.find(PoolId{static_cast<uint64_t>(pool)});
    if (found == pools_.end() || group < 0 || group >= std::ssize(found->second.extents))
      throw ReplayError("there is no group " + std::to_string(group));
    start_leaving(found->second, static_cast<uint32_t>(group), index);
  }
}

}  // namespace larder
