#include <cstdio>

#include "client/ctl/replay/operations.h"
#include "client/ctl/replay/references.h"

namespace larder::replay {
namespace {

Value number(int64_t value) { return {static_cast<double>(value)}; }

}  // namespace

Outcome apply(const Alloc& step, OpenedPool& pool, const Context&) {
  auto blocks = pool.pool.allocate(step.num_blocks);
  if (!blocks) return {blocks.status(), {}};
  return {{}, {std::move(*blocks)}};
}

Outcome apply(const Release& step, OpenedPool& pool, const Context& context) {
  const auto blocks = resolve_blocks(step.blocks, context);
  if (!blocks) return {blocks.status(), {}};
  return {pool.pool.release(*blocks), {}};
}

Outcome apply(const Publish& step, OpenedPool& pool, const Context& context) {
  const auto blocks = resolve_blocks(step.blocks, context);
  if (!blocks) return {blocks.status(), {}};
  const auto published = pool.pool.publish(step.tokens, *blocks, step.adapter, step.extra);
  if (!published) return {published.status(), {}};
  Texts keys;
  Blocks holders;
  for (const PublishedBlock& block : *published) {
    keys.push_back(to_hex({block.key.begin(), block.key.end()}));
    holders.push_back(block.block);
  }
  return {{}, {Parts{{"key", {std::move(keys)}}, {"block", {std::move(holders)}}}}};
}

Outcome apply(const Lookup& step, OpenedPool& pool, const Context&) {
  auto prefix = pool.pool.lookup(step.tokens, step.hold, step.adapter, step.extra);
  if (!prefix) return {prefix.status(), {}};
  return {
      {},
      {Parts{{"hit_tokens", number(prefix->hit_tokens)}, {"blocks", {std::move(prefix->blocks)}}}}};
}

Outcome apply(const Copy& step, OpenedPool& pool, const Context& context) {
  const auto from = resolve_blocks(step.from, context);
  if (!from) return {from.status(), {}};
  const auto to = resolve_blocks(step.to, context);
  if (!to) return {to.status(), {}};
  return {pool.pool.copy(*from, *to), {}};
}

Outcome apply(const Scrub& step, OpenedPool& pool, const Context& context) {
  const auto blocks = resolve_ids(step.blocks, context);
  if (!blocks) return {blocks.status(), {}};
  return {pool.pool.scrub(*blocks), {}};
}

Outcome apply(const Checksum& step, OpenedPool& pool, const Context& context) {
  const auto blocks = resolve_ids(step.blocks, context);
  if (!blocks) return {blocks.status(), {}};
  const auto figures = pool.pool.checksum(*blocks);
  if (!figures) return {figures.status(), {}};
  Texts texts;
  for (const uint64_t figure : *figures) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(figure));
    texts.emplace_back(text);
  }
  return {{}, {std::move(texts)}};
}

Outcome stats_of(OpenedPool& pool) {
  const auto stats = pool.pool.stats();
  if (!stats) return {stats.status(), {}};
  if (stats->size() != 1)
    return refused(ErrorCode::kInternal,
                   "the pool has " + std::to_string(stats->size()) + " groups, one was opened");
  const PoolGroupStats& group = stats->front();
  return {{},
          {Parts{{"capacity", number(group.capacity)},
                 {"free", number(group.free)},
                 {"open", number(group.open)},
                 {"published", number(group.published)},
                 {"cached", number(group.cached)},
                 {"quarantined", number(group.quarantined)},
                 // Published blocks that nobody holds are counted as cached.
                 {"pinned", number(group.published)},
                 {"physical_bytes", number(group.physical_bytes)},
                 {"used_bytes", number(group.used_bytes)},
                 {"slack_bytes", number(group.slack_bytes)}}}};
}

}  // namespace larder::replay
