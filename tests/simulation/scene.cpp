#include "tests/simulation/scene.h"

#include <cstdio>

#include "tests/simulation/client.h"
#include "tests/simulation/executor.h"
#include "tests/simulation/violation.h"

namespace larder::sim {

Scene::Scene(uint64_t seed, uint64_t episode, const Options& with_options, Coverage& counted)
    : chance(seed, episode),
      coverage(counted),
      options(with_options),
      crash(chance, counted),
      keeper(memories, counted) {}

Scene::~Scene() = default;

bool Scene::is_in_a_copy(const BlockName& name) const {
  for (const auto& executor : executors)
    if (executor->works_on(name)) return true;
  return false;
}

void Scene::check_nobody_uses(const BlockName& name, const Client* but) const {
  for (const auto& client : clients)
    SIM_CHECK(client.get() == but || !client->may_write(name), "two writers of block", name.block,
              "of group", name.group, "of pool", value(name.pool), "pid", client->process().pid());
  if (but != nullptr)
    SIM_CHECK(!but->may_write(name), "handed out twice to one session: block", name.block);
  SIM_CHECK(!is_in_a_copy(name), "a copy runs on block", name.block, value(name.pool));
}

void Scene::check_may_write(const BlockName& name, SessionId session) const {
  if (!books.pools().contains(name.pool)) return;  // only quarantined memory is left of it
  const uint64_t word = books.word(name);
  SIM_CHECK(word == owner_word(OwnerState::kNone) || word == owner_word(OwnerState::kOpen, session),
            "a block of somebody else is written: block", name.block, "of group", name.group,
            "of pool", value(name.pool), "by session", value(session), "word", word);
}

void Scene::check_nobody_maps(const Memory* memory) const {
  for (const auto& client : clients)
    SIM_CHECK(!client->maps(memory), "memory is dropped that somebody maps: pid",
              client->process().pid(), "memory", memory->number);
}

void Scene::check_prefix(PoolId pool, const PoolSpec& spec, const Path& path, int64_t first_unit,
                         const std::vector<BlockRef>& blocks, bool complete) const {
  int64_t slots = 0;
  for (const GroupSpec& group : spec.groups) slots += blocks_in_unit(spec.groups, group);
  const int64_t last_unit = first_unit + std::ssize(blocks) / slots;
  SIM_CHECK(std::ssize(blocks) % slots == 0 && last_unit <= std::ssize(path), blocks.size(), slots);
  const Books::Pool& known = books.pools().at(pool);
  size_t i = 0;
  for (int64_t unit = first_unit; unit < last_unit; ++unit)
    for (uint32_t group = 0; group < spec.groups.size(); ++group) {
      const GroupSpec& of = spec.groups[group];
      const int64_t per_unit = blocks_in_unit(spec.groups, of);
      for (int32_t slot = 0; slot < per_unit; ++slot, ++i) {
        // Tokens between the end of this block and that of the prefix.
        const int64_t behind = ((last_unit - unit) * per_unit - slot - 1) * of.block_tokens;
        const bool needed = of.kind == GroupKind::kFull ||
                            (of.kind == GroupKind::kWindow && behind < of.window_tokens) ||
                            (of.kind == GroupKind::kState && unit == last_unit - 1);
        SIM_CHECK(!complete || (blocks[i].id >= 0) == needed, "a prefix with a gap: unit", unit,
                  "of", last_unit, "group", group);
        if (blocks[i].id < 0) continue;
        const BlockName name{pool, group, blocks[i].id};
        SIM_CHECK(books.word(name) == owner_word(OwnerState::kPublished), "not published",
                  name.block);
        const uint64_t* content = books.content(name);
        SIM_CHECK(content != nullptr, "a block without memory", name.block);
        const uint64_t right =
            content_for(known.tenant, known.name, path, static_cast<size_t>(unit) + 1, group, slot);
        SIM_CHECK(*content == right, "wrong content in block", name.block, "of group", group,
                  "of pool", value(pool), "unit", unit, "found", *content, "expected", right);
        ++coverage.checked_hits;
      }
    }
}

void Scene::log(const std::string& text) const {
  if (options.verbose)
    std::printf("%llu %s\n", static_cast<unsigned long long>(coverage.num_events), text.c_str());
}

}  // namespace larder::sim
