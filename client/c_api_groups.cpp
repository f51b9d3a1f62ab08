// The C API: pools that grow, and pools with several groups.
#include "client/c_api_support.h"

using namespace larder;
using namespace larder::c_api;

namespace {

Status write_result(const Result<ResizeResult>& result, larder_resize_result* out) {
  if (result && out != nullptr)
    *out = {result->blocks_before, result->blocks_after, result->bytes_before, result->bytes_after};
  return result.status();
}

std::string entry(const char* field, size_t index) {
  return std::string(field) + "[" + std::to_string(index) + "]";
}

// The room that a lookup of `num_tokens` tokens needs in a group.
size_t room_of(Pool& pool, size_t group, size_t num_tokens) {
  const auto unit = static_cast<size_t>(pool.unit_tokens());
  return num_tokens / unit * static_cast<size_t>(pool.blocks_per_unit(static_cast<int32_t>(group)));
}

void check_num_groups(Arguments& in, const larder_pool* pool, size_t num_groups) {
  if (in.required("pool", pool) &&
      num_groups != static_cast<size_t>(pool->state->pool.num_groups()))
    in.refuse("num_groups is " + std::to_string(num_groups) + ", the pool has " +
              std::to_string(pool->state->pool.num_groups()));
}

}  // namespace

extern "C" {

larder_code larder_pool_group(const larder_pool* pool, int32_t index, larder_pool** group) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("group", group)) return in.status();
    *group = nullptr;
    if (!in.required("pool", pool)) return in.status();
    auto view = pool->state->pool.group(index);
    if (!view) return view.status();
    auto state = std::make_shared<PoolState>(PoolState{pool->state->client, std::move(*view)});
    *group = new larder_pool{std::move(state)};
    return {};
  });
}

larder_code larder_pool_resize(larder_pool* pool, int64_t num_blocks,
                               larder_resize_result* result) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("pool", pool)) return in.status();
    return write_result(pool->state->pool.resize(num_blocks), result);
  });
}

larder_code larder_pool_evict(larder_pool* pool, int64_t num_blocks, larder_resize_result* result) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("pool", pool)) return in.status();
    return write_result(pool->state->pool.evict(num_blocks), result);
  });
}

larder_code larder_pool_publish_units(larder_pool* pool, const int32_t* tokens, size_t num_tokens,
                                      const larder_block* const* blocks, const size_t* num_blocks,
                                      size_t num_groups, const char* adapter,
                                      const larder_bytes* extra, size_t num_extra,
                                      larder_published_block* const* published) {
  return guarded([&]() -> Status {
    Arguments in;
    check_num_groups(in, pool, num_groups);
    const auto token_ids = in.array("tokens", tokens, num_tokens);
    const auto lists = in.array("blocks", blocks, num_groups);
    const auto counts = in.array("num_blocks", num_blocks, num_groups);
    const auto extras = in.strings("extra", extra, num_extra);
    std::vector<std::vector<BlockHandle>> given;
    for (size_t g = 0; in.ok() && g < num_groups; ++g) {
      given.push_back(in.blocks(entry("blocks", g), lists[g], counts[g]));
      if (published != nullptr) in.output(entry("published", g), published[g], counts[g]);
    }
    if (!in.ok()) return in.status();
    auto result = pool->state->pool.publish_units(token_ids, given, text_or(adapter, ""), extras);
    if (!result || published == nullptr) return result.status();
    for (size_t g = 0; g < num_groups; ++g)
      std::transform((*result)[g].begin(), (*result)[g].end(), published[g],
                     [](const PublishedBlock& block) { return to_c(block); });
    return {};
  });
}

larder_code larder_pool_lookup_units(larder_pool* pool, const int32_t* tokens, size_t num_tokens,
                                     int32_t hold, const char* adapter, const larder_bytes* extra,
                                     size_t num_extra, larder_block* const* blocks,
                                     const size_t* capacities, size_t num_groups,
                                     size_t* num_blocks, int64_t* hit_tokens) {
  return guarded([&]() -> Status {
    Arguments in;
    check_num_groups(in, pool, num_groups);
    const auto token_ids = in.array("tokens", tokens, num_tokens);
    const auto extras = in.strings("extra", extra, num_extra);
    const bool holds = in.flag("hold", hold);
    const auto lists = in.array("blocks", blocks, num_groups);
    const auto rooms = in.array("capacities", capacities, num_groups);
    const auto counts = in.output("num_blocks", num_blocks, num_groups);
    in.required("hit_tokens", hit_tokens);
    if (!in.ok()) return in.status();
    // What is held must have a place, so the room is asked for before the daemon is.
    Pool& open = pool->state->pool;
    for (size_t g = 0; g < num_groups; ++g)
      in.room(entry("blocks", g), lists[g], rooms[g], room_of(open, g, num_tokens));
    if (!in.ok()) {
      for (size_t g = 0; g < num_groups; ++g) counts[g] = room_of(open, g, num_tokens);
      return in.status();
    }
    auto prefix = open.lookup_units(token_ids, holds, text_or(adapter, ""), extras);
    if (!prefix) return prefix.status();
    for (size_t g = 0; g < num_groups; ++g)
      if (prefix->blocks[g].size() > rooms[g])
        return expect_count("blocks", prefix->blocks[g].size(), rooms[g]);
    for (size_t g = 0; g < num_groups; ++g) {
      counts[g] = prefix->blocks[g].size();
      std::transform(prefix->blocks[g].begin(), prefix->blocks[g].end(), lists[g],
                     [](const BlockHandle& block) { return to_c(block); });
    }
    *hit_tokens = prefix->hit_tokens;
    return {};
  });
}

}  // extern "C"
