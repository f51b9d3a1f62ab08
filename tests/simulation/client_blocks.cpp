// What clients do with blocks: allocate, fill, publish, look up, copy, release.
//
// Blocks that a request names are taken out of the client's books until it is answered, so that it
// asks for one thing at a time about each.
#include <algorithm>

#include "tests/simulation/client.h"
#include "tests/simulation/violation.h"
#include "tests/simulation/workload.h"

namespace larder::sim {
namespace {

// The client's books say that it may ask this, so nothing can be in the way.
template <typename Body>
const Body& granted(const Answer& answer, const char* what) {
  const auto* refusal = std::get_if<Status>(&answer.body);
  SIM_CHECK(refusal == nullptr, what, "was refused:", refusal->to_string());
  return std::get<Body>(answer.body);
}

}  // namespace

// ------------------------------------------------------------------------------------- allocate

void Client::allocate(OpenedPool& pool) {
  const auto group = static_cast<uint32_t>(scene_.chance.below(pool.open.size()));
  if (pool.open[group].size() > 8) return release_open(pool);
  int64_t num_blocks = 1 + scene_.chance.below(4);
  if (scene_.chance.one_in(40)) num_blocks = 60 + scene_.chance.below(20);
  const int64_t total = scene_.chance.one_in(4) ? num_blocks + scene_.chance.below(4) : 0;
  ask(Allocate{0, session_, pool.id, group, num_blocks, total},
      [this, id = pool.id, group, num_blocks](const Answer& answer) {
        const auto* allocated = std::get_if<BlocksAllocated>(&answer.body);
        short_of_blocks_ = allocated == nullptr;
        if (allocated == nullptr) return;
        SIM_CHECK(std::ssize(allocated->blocks) == num_blocks, allocated->blocks.size());
        const auto pool_of = pools_.find(id);
        SIM_CHECK(pool_of != pools_.end(), "blocks of a pool that is not open", value(id));
        for (const BlockRef& block : allocated->blocks)
          SIM_CHECK(pool_of->second.open[group].emplace(block.id, block).second, block.id);
      });
}

// -------------------------------------------------------------------------------------- release

void Client::release_open(OpenedPool& pool) {
  const auto group = static_cast<uint32_t>(scene_.chance.below(pool.open.size()));
  std::vector<BlockRef> blocks;
  for (int i = 1 + scene_.chance.below(3); i > 0 && !pool.open[group].empty(); --i) {
    const auto block = scene_.chance.pick(pool.open[group]);
    blocks.push_back(block->second);
    pool.open[group].erase(block);
  }
  if (blocks.empty()) return;
  ask(Release{0, session_, pool.id, group, blocks},
      [this, id = pool.id, group, blocks](const Answer& answer) {
        granted<Done>(answer, "Release of open blocks");
        with_pool(id, [&](OpenedPool& open) {
          for (const BlockRef& block : blocks) open.past.emplace_back(group, block);
          while (open.past.size() > 8) open.past.erase(open.past.begin());
        });
      });
}

void Client::release_held(OpenedPool& pool) {
  if (pool.loose.size() < 8 && !pool.prefixes.empty()) {
    const auto prefix = scene_.chance.pick(pool.prefixes);
    pool.loose.insert(pool.loose.end(), prefix->blocks.begin(), prefix->blocks.end());
    pool.prefixes.erase(prefix);
  }
  if (pool.loose.empty()) return;
  const uint32_t group = scene_.chance.pick(pool.loose)->group;
  std::vector<HeldBlock> released;
  std::vector<BlockRef> blocks;
  for (size_t i = 0; i < pool.loose.size() && blocks.size() < 6;) {
    if (pool.loose[i].group != group || scene_.chance.one_in(4)) {
      ++i;
      continue;
    }
    released.push_back(pool.loose[i]);
    blocks.push_back(pool.loose[i].ref);
    pool.loose.erase(pool.loose.begin() + static_cast<ptrdiff_t>(i));
  }
  if (blocks.empty()) return;
  ask(Release{0, session_, pool.id, group, blocks},
      [this, id = pool.id, released](const Answer& answer) {
        // It may have several holds on a block, and a copy may run under another one of them.
        const auto* refusal = std::get_if<Status>(&answer.body);
        if (refusal == nullptr) return;
        SIM_CHECK(refusal->code() == ErrorCode::kBusy, refusal->to_string());
        with_pool(id, [&](OpenedPool& open) {
          open.loose.insert(open.loose.end(), released.begin(), released.end());
        });
      });
}

// A reference of the past is refused, whoever has the block now.
void Client::release_past(OpenedPool& pool) {
  if (pool.past.empty()) return;
  const auto [group, block] = *scene_.chance.pick(pool.past);
  ask(Release{0, session_, pool.id, group, {block}}, [](const Answer& answer) {
    const auto* refusal = std::get_if<Status>(&answer.body);
    SIM_CHECK(refusal != nullptr, "an old generation was accepted");
    SIM_CHECK(
        refusal->code() == ErrorCode::kStaleGeneration || refusal->code() == ErrorCode::kNotFound,
        refusal->to_string());
  });
}

// -------------------------------------------------------------------------------------- publish

// Open blocks for whole units, or nothing where there are not enough that can be written.
std::optional<std::vector<BlockRef>> Client::take_for(OpenedPool& pool, int64_t num_units) {
  std::vector<BlockRef> taken;
  std::vector<std::map<int32_t, BlockRef>> open = pool.open;
  for (int64_t i = 0; i < num_units * std::ssize(pool.slots); ++i) {
    const uint32_t group = pool.slots[static_cast<size_t>(i) % pool.slots.size()].first;
    if (pool.spec.groups[group].kind != GroupKind::kFull && scene_.chance.one_in(6)) {
      taken.push_back({});
      continue;
    }
    if (open[group].empty()) return std::nullopt;
    const auto block = scene_.chance.pick(open[group]);
    if (!is_mapped(pool, group, block->first)) return std::nullopt;
    taken.push_back(block->second);
    open[group].erase(block);
  }
  pool.open = std::move(open);
  return taken;
}

void Client::put_back(OpenedPool& pool, const std::vector<BlockRef>& blocks) {
  for (size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i].id >= 0)
      pool.open[pool.slots[i % pool.slots.size()].first].emplace(blocks[i].id, blocks[i]);
}

void Client::publish(OpenedPool& pool) {
  if (filling_) return;
  Filling filling{pool.id, {}, 0, {}, 0};
  if (!pool.prefixes.empty() && scene_.chance.one_in(2)) {
    filling.path = scene_.chance.pick(pool.prefixes)->path;
    filling.first_unit = std::ssize(filling.path);
  }
  if (filling.path.size() > 6) return;
  const Path more = random_path(scene_.chance, 3);
  filling.path.insert(filling.path.end(), more.begin(), more.end());
  auto blocks = take_for(pool, std::ssize(more));
  if (!blocks) return allocate(pool);
  filling.blocks = std::move(*blocks);
  fill(pool, std::move(filling));
}

void Client::fill(OpenedPool& pool, Filling filling) {
  for (size_t i = 0; i < filling.blocks.size(); ++i) {
    const BlockRef block = filling.blocks[i];
    if (block.id < 0) continue;
    const auto [group, slot] = pool.slots[i % pool.slots.size()];
    const size_t unit = static_cast<size_t>(filling.first_unit) + i / pool.slots.size();
    const uint64_t content =
        content_for(tenant_, pool.spec.name, filling.path, unit + 1, group, slot);
    if (maps_memory()) {
      write(pool, group, block.id, content);
    } else {
      ring_.push_back({{pool.id, group, block.id}, content});
      ++filling.appends;
    }
  }
  if (filling.appends == 0) return send_publish(filling);
  filling_ = std::move(filling);
}

void Client::send_publish(const Filling& filling) {
  const auto found = pools_.find(filling.pool);
  SIM_CHECK(found != pools_.end(), "filled for a pool that is not open");
  const OpenedPool& pool = found->second;
  const auto whole = std::any_of(filling.blocks.begin(), filling.blocks.end(),
                                 [](const BlockRef& block) { return block.id < 0; });
  ask(Publish{0,
              session_,
              pool.id,
              "",
              tokens_of(filling.path, pool.tokens),
              filling.blocks,
              {},
              filling.first_unit},
      [this, filling, assured = !whole](const Answer& answer) {
        const auto opened = pools_.find(filling.pool);
        if (opened == pools_.end()) return;
        if (const auto* refusal = std::get_if<Status>(&answer.body)) {
          // The client may have let go of the prefix that it goes on from.
          SIM_CHECK(refusal->code() == ErrorCode::kNotFound && filling.first_unit > 0,
                    refusal->to_string());
          return put_back(opened->second, filling.blocks);
        }
        const auto& serving = granted<BlocksPublished>(answer, "Publish").blocks;
        SIM_CHECK(serving.size() == filling.blocks.size(), serving.size());
        std::vector<BlockRef> not_used = filling.blocks;
        for (size_t i = 0; i < serving.size(); ++i)
          if (serving[i] == filling.blocks[i]) not_used[i] = {};
        put_back(opened->second, not_used);
        const bool from_root = filling.first_unit == 0;
        hold(opened->second, filling.path, filling.first_unit, serving, assured && from_root);
      });
}

// One hold on each block more.
void Client::hold(OpenedPool& pool, const Path& path, int64_t first_unit,
                  const std::vector<BlockRef>& blocks, bool assured) {
  HeldPrefix prefix{path, {}, assured};
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].id < 0) continue;
    const auto [group, slot] = pool.slots[i % pool.slots.size()];
    const size_t unit = static_cast<size_t>(first_unit) + i / pool.slots.size();
    prefix.blocks.push_back(
        {group, blocks[i], content_for(tenant_, pool.spec.name, path, unit + 1, group, slot)});
  }
  if (prefix.blocks.empty()) return;
  if (first_unit > 0 || pool.prefixes.size() >= 6) {
    pool.loose.insert(pool.loose.end(), prefix.blocks.begin(), prefix.blocks.end());
  } else {
    pool.prefixes.push_back(std::move(prefix));
  }
}

// -------------------------------------------------------------------------------------- look up

void Client::look_up(OpenedPool& pool) {
  Path path = random_path(scene_.chance, 6);
  int64_t assured_units = 0;
  if (!pool.prefixes.empty() && scene_.chance.one_in(2)) {
    const HeldPrefix& prefix = *scene_.chance.pick(pool.prefixes);
    if (prefix.assured) assured_units = std::ssize(prefix.path);
    path.insert(path.begin(), prefix.path.begin(), prefix.path.end());
  }
  const bool with_hold = scene_.chance.one_in(2) && pool.loose.size() < 24;
  int64_t first_unit = 0;
  int64_t max_blocks = kMaxBlocksPerGroup;
  if (pool.slots.size() == 1 && scene_.chance.one_in(4)) {
    first_unit = scene_.chance.below(path.size() + 1);
    max_blocks = scene_.chance.below(8);
    assured_units = 0;
  }
  ask(Lookup{0,
             session_,
             pool.id,
             "",
             tokens_of(path, pool.tokens),
             {},
             with_hold,
             first_unit,
             max_blocks},
      [=, this, id = pool.id](const Answer& answer) {
        const auto& found = granted<PrefixFound>(answer, "Lookup");
        with_pool(id, [&](OpenedPool& open) {
          const int64_t units = std::ssize(found.blocks) / std::ssize(open.slots);
          SIM_CHECK(found.hit_tokens == units * open.tokens, found.hit_tokens, units);
          SIM_CHECK(answer.again || units >= assured_units, "what it holds was not found", units,
                    assured_units);
          SIM_CHECK(std::ssize(found.blocks) <= max_blocks, found.blocks.size());
          const auto end = path.begin() + static_cast<ptrdiff_t>(first_unit + units);
          if (with_hold) hold(open, Path(path.begin(), end), first_unit, found.blocks, true);
        });
      });
}

// ----------------------------------------------------------------------------------------- copy

void Client::copy(OpenedPool& pool) {
  const auto group = static_cast<uint32_t>(scene_.chance.below(pool.open.size()));
  auto& open = pool.open[group];
  if (open.size() < 2) return;
  const BlockRef to = scene_.chance.pick(open)->second;
  open.erase(to.id);
  const auto held = std::find_if(pool.loose.begin(), pool.loose.end(),
                                 [&](const HeldBlock& block) { return block.group == group; });
  std::optional<HeldBlock> loose;
  BlockRef from;
  if (held != pool.loose.end() && scene_.chance.one_in(2)) {
    loose = *held;
    from = held->ref;
    pool.loose.erase(held);
  } else {
    from = scene_.chance.pick(open)->second;
    open.erase(from.id);
  }
  const auto is_back = std::make_shared<int>(1);
  const auto give_back = [this, id = pool.id, group, to, is_back] {
    if (--*is_back > 0) return;
    with_pool(id, [&](OpenedPool& there) { there.open[group].emplace(to.id, to); });
  };
  ask(Copy{0, session_, pool.id, group, {from}, {to}},
      [this, id = pool.id, group, from, to, loose, give_back](const Answer& answer) {
        with_pool(id, [&](OpenedPool& there) {
          if (loose) {
            there.loose.push_back(*loose);
          } else {
            there.open[group].emplace(from.id, from);
          }
          if (std::holds_alternative<Done>(answer.body) && loose && cache_ == scene_.cache)
            SIM_CHECK(*scene_.books.content({id, group, to.id}) == loose->content,
                      "a copy has another content", to.id);
        });
        give_back();
      });
  if (open.empty() || !scene_.chance.one_in(4)) return;
  // What is being written cannot be read: BUSY, unless the first copy has ended by then.
  const BlockRef other = scene_.chance.pick(open)->second;
  open.erase(other.id);
  ++*is_back;
  ask(Copy{0, session_, pool.id, group, {to}, {other}},
      [this, id = pool.id, group, other, give_back](const Answer&) {
        with_pool(id, [&](OpenedPool& there) { there.open[group].emplace(other.id, other); });
        give_back();
      });
}

}  // namespace larder::sim
