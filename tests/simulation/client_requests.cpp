// What clients ask about sessions, pools and memory, and what they should not ask.
#include <algorithm>

#include "tests/simulation/client.h"
#include "tests/simulation/violation.h"
#include "tests/simulation/workload.h"

namespace larder::sim {
namespace {

template <typename Body>
const Body& expect(const Answer& answer, const char* what) {
  const auto* refusal = std::get_if<Status>(&answer.body);
  SIM_CHECK(refusal == nullptr, what, "was refused:", refusal->to_string());
  const auto* body = std::get_if<Body>(&answer.body);
  SIM_CHECK(body != nullptr, what, "has an answer of another kind", answer.body.index());
  return *body;
}

ErrorCode code_of(const Answer& answer) {
  const auto* refusal = std::get_if<Status>(&answer.body);
  return refusal == nullptr ? ErrorCode::kOk : refusal->code();
}

}  // namespace

void Client::ask_something() {
  if (role_ == Role::kAdmin && scene_.chance.one_in(24)) return administer();
  if (pools_.empty() ? scene_.chance.one_in(4) : scene_.chance.one_in(40)) return open_pool();
  if (pools_.empty()) return;
  OpenedPool& pool = scene_.chance.pick(pools_)->second;
  if (pool.closing) return;
  if (maps_memory() && scene_.chance.one_in(3)) map_what_is_missing(pool);
  ask_about(pool);
}

void Client::ask_about(OpenedPool& pool) {
  if (short_of_blocks_ && scene_.chance.one_in(2))
    return scene_.chance.one_in(2) ? release_open(pool) : release_held(pool);
  const int what = scene_.chance.below(42);
  if (role_ == Role::kRead && what < 24) return look_up(pool);
  if (what < 10) return allocate(pool);
  if (what < 18) return publish(pool);
  if (what < 23) return look_up(pool);
  if (what < 26) return release_open(pool);
  if (what < 32) return release_held(pool);
  if (what < 35) return copy(pool);
  if (what < 38) return resize(pool);
  if (what < 39) return evict(pool);
  if (what < 40) return release_past(pool);
  if (what < 41) return ask_nonsense(pool);
  if (scene_.chance.one_in(3)) close_pool(pool);
}

// ------------------------------------------------------------------------------------------ pools

void Client::open_pool() {
  const PoolSpec spec = random_pool(scene_.chance);
  ask(OpenPool{0, session_, spec, spec.name}, [this, spec](const Answer& answer) {
    const auto* opened = std::get_if<PoolOpened>(&answer.body);
    if (opened == nullptr || pools_.contains(opened->pool)) return;
    OpenedPool pool;
    pool.id = opened->pool;
    pool.spec = spec;
    pool.layouts = opened->groups;
    pool.tokens = unit_tokens(spec.groups);
    for (uint32_t group = 0; group < spec.groups.size(); ++group)
      for (int32_t i = 0; i < blocks_in_unit(spec.groups, spec.groups[group]); ++i)
        pool.slots.emplace_back(group, i);
    pool.open.resize(spec.groups.size());
    pools_.emplace(opened->pool, std::move(pool));
  });
}

// It unmaps first, as larderd takes the session to have nothing of the pool mapped afterwards.
void Client::close_pool(OpenedPool& pool) {
  if (filling_ && filling_->pool == pool.id) return;
  for (const auto& [number, pending] : pending_)
    if (!std::holds_alternative<Copy>(pending.event)) return;
  pool.closing = true;
  pool.mapped.clear();
  ask(ClosePool{0, session_, pool.id}, [this, id = pool.id](const Answer& answer) {
    if (std::holds_alternative<Done>(answer.body)) {
      pools_.erase(id);
      return;
    }
    SIM_CHECK(code_of(answer) == ErrorCode::kBusy, "ClosePool",
              std::get<Status>(answer.body).to_string());
    with_pool(id, [](OpenedPool& open) { open.closing = false; });
  });
}

// ----------------------------------------------------------------------------------------- memory

void Client::map(OpenedPool& pool, uint32_t group, uint32_t extent) {
  if (pool.mapped.contains({group, extent}) || !pool.mapping.insert({group, extent}).second) return;
  ask(MapExtents{0, session_, pool.id, group, extent, 1},
      [this, id = pool.id, group, extent](const Answer& answer) {
        with_pool(id, [&](OpenedPool& open) { open.mapping.erase({group, extent}); });
        if (code_of(answer) == ErrorCode::kPermissionDenied && role_ == Role::kRead) return;
        const SegmentId segment = expect<ExtentsMapped>(answer, "MapExtents").segments.at(0);
        Memory* memory = answer.memories.at(0);
        if (memory == nullptr) return;
        SIM_CHECK(cache_ != scene_.cache || is_out_of_sight() ||
                      scene_.books.segments().contains(segment),
                  "memory is mapped that was dropped", value(segment));
        with_pool(id, [&](OpenedPool& open) {
          const auto [mapping, fresh] = open.mapped.try_emplace({group, extent});
          SIM_CHECK(fresh || mapping->second.segment == segment, "mapped over", value(segment));
          mapping->second = {segment, memory};
        });
      });
}

void Client::map_what_is_missing(OpenedPool& pool) {
  if (scene_.chance.one_in(2)) {  // others than it writes to, for reading
    const auto group = static_cast<uint32_t>(scene_.chance.below(pool.layouts.size()));
    map(pool, group,
        static_cast<uint32_t>(
            scene_.chance.below(static_cast<size_t>(pool.layouts[group].num_extents()))));
  }
  for (uint32_t group = 0; group < pool.open.size(); ++group)
    for (const auto& [block, ref] : pool.open[group])
      if (!is_mapped(pool, group, block)) return;  // it has just been asked for
}

bool Client::is_mapped(OpenedPool& pool, uint32_t group, int32_t block) {
  if (!maps_memory()) return true;
  const auto extent = static_cast<uint32_t>(pool.layouts[group].extent_of(block));
  if (pool.mapped.contains({group, extent})) return true;
  map(pool, group, extent);
  return false;
}

void Client::resize(OpenedPool& pool) {
  const auto group = static_cast<uint32_t>(scene_.chance.below(pool.layouts.size()));
  const GroupLayout layout = pool.layouts[group];
  const int64_t num_blocks = scene_.chance.below(static_cast<size_t>(layout.num_blocks) + 2);
  ask(ResizePool{0, session_, pool.id, group, num_blocks},
      [this, layout, num_blocks](const Answer& answer) {
        if (const auto* resized = std::get_if<Resized>(&answer.body)) {
          SIM_CHECK(layout.grows() && num_blocks <= layout.num_blocks, "resized", num_blocks);
          SIM_CHECK(resized->blocks_before >= 0 && resized->bytes_before >= 0, "resized from");
          return;
        }
        if (!layout.grows() && role_ != Role::kRead)
          SIM_CHECK(code_of(answer) == ErrorCode::kUnsupported, "fixed size");
      });
}

void Client::evict(OpenedPool& pool) {
  const int64_t num_blocks = scene_.chance.below(8);
  ask(EvictBlocks{0, session_, pool.id, num_blocks},
      [num_blocks, slots = std::ssize(pool.slots)](const Answer& answer) {
        const auto* evicted = std::get_if<Resized>(&answer.body);
        if (evicted == nullptr) return;
        SIM_CHECK(evicted->blocks_before - evicted->blocks_after < num_blocks + slots, "evicted",
                  evicted->blocks_before, evicted->blocks_after, num_blocks);
      });
}

// ------------------------------------------------------------------------------------------ admin

void Client::administer() {
  constexpr int64_t kMiB = int64_t{1} << 20;
  if (scene_.chance.one_in(3)) {
    const char* tenant = scene_.chance.one_in(8) ? "nobody" : kTenants[scene_.chance.below(3)];
    const int64_t guaranteed = scene_.chance.below(24) * kMiB;
    const int64_t maximum = scene_.chance.one_in(2) ? 0 : scene_.chance.below(80) * kMiB;
    ask(SetQuota{0, session_, tenant, guaranteed, maximum}, [](const Answer&) {});
    return;
  }
  PoolId pool{static_cast<uint64_t>(scene_.chance.below(100))};
  for (const auto& [id, known] : scene_.books.pools())
    if (known.tenant == tenant_ && scene_.chance.one_in(2)) pool = id;
  ask(DestroyPool{0, session_, pool}, [this, pool](const Answer& answer) {
    if (code_of(answer) == ErrorCode::kOk)
      SIM_CHECK(!pools_.contains(pool), "destroyed while it is open", value(pool));
  });
}

// Each of these has to be refused with its code.
void Client::ask_nonsense(OpenedPool& pool) {
  const auto refused = [](ErrorCode code) {
    return [code](const Answer& answer) {
      SIM_CHECK(answer.again || code_of(answer) == code, "expected", error_code_name(code), "not",
                error_code_name(code_of(answer)));
    };
  };
  const PoolId no_pool{99999};
  const auto last_group = static_cast<uint32_t>(pool.layouts.size());
  switch (scene_.chance.below(10)) {
    case 0:
      return ask(Lookup{0, session_, no_pool, "", {}, {}, true}, refused(ErrorCode::kNotFound));
    case 1:
      return ask(Release{0, session_, pool.id, last_group, {}}, refused(ErrorCode::kNotFound));
    case 2:
      return ask(Release{0, session_, pool.id, 0, {{-2, 1}}}, refused(ErrorCode::kNotFound));
    case 3:
      return ask(Lookup{0, session_, pool.id, "", {-1}, {}, false},
                 refused(ErrorCode::kInvalidArgument));
    case 4:
      return ask(Lookup{0, session_, pool.id, "", {}, {"x"}, false},
                 refused(ErrorCode::kInvalidArgument));
    case 5:
      return ask(Release{0, session_, pool.id, 0, {{int32_t{1} << 30, 1}}},
                 refused(ErrorCode::kNotFound));
    case 6:
      if (role_ == Role::kAdmin) return;
      return ask(DestroyPool{0, session_, pool.id}, refused(ErrorCode::kPermissionDenied));
    case 7:
      if (role_ != Role::kRead) return;
      return ask(Allocate{0, session_, pool.id, 0, 1}, refused(ErrorCode::kPermissionDenied));
    case 8:
      if (role_ == Role::kRead) return;
      return ask(Allocate{0, session_, pool.id, 0, 0}, refused(ErrorCode::kInvalidArgument));
    default:
      if (role_ == Role::kRead) return;
      return ask(MapExtents{0, session_, pool.id, 0, 1000, 1},
                 refused(ErrorCode::kInvalidArgument));
  }
}

}  // namespace larder::sim
