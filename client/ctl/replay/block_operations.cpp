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
  auto blocks = resolve_blocks(step.blocks, context);
  if (!blocks) return {blocks.status(), {}};
  // A whole result may have places without a block, of units that need none.
  const bool is_whole_result = step.blocks.size() == 1 && !step.blocks[0].result.empty();
  if (is_whole_result) std::erase(*blocks, BlockHandle());
  return {pool.pool.release(*blocks), {}};
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

namespace {

Outcome resized(const Result<ResizeResult>& result) {
  if (!result) return {result.status(), {}};
  return {{},
          {Parts{{"blocks_before", number(result->blocks_before)},
                 {"blocks_after", number(result->blocks_after)},
                 {"bytes_before", number(result->bytes_before)},
                 {"bytes_after", number(result->bytes_after)}}}};
}

}  // namespace

Outcome apply(const Resize& step, OpenedPool& pool, const Context&) {
  return resized(pool.pool.resize(step.num_blocks));
}

Outcome apply(const Evict& step, OpenedPool& pool, const Context&) {
  return resized(pool.pool.evict(step.num_blocks));
}

}  // namespace larder::replay
