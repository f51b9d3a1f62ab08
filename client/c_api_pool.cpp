// The C API: pools and their blocks.
#include <algorithm>

#include "client/c_api_support.h"

using namespace larder;
using namespace larder::c_api;

namespace {

larder_group_stats to_c(const PoolGroupStats& stats) {
  larder_group_stats result = {};
  // Names are at most 128 bytes long (protocol/limits.h).
  stats.name.copy(result.name, sizeof result.name - 1);
  result.capacity = stats.capacity;
  result.free = stats.free;
  result.open = stats.open;
  result.published = stats.published;
  result.cached = stats.cached;
  result.quarantined = stats.quarantined;
  result.physical_bytes = stats.physical_bytes;
  result.used_bytes = stats.used_bytes;
  result.slack_bytes = stats.slack_bytes;
  result.max_blocks = stats.max_blocks;
  result.evictable = stats.evictable;
  result.leaving_bytes = stats.leaving_bytes;
  result.quarantined_pidfd = stats.quarantined_pidfd;
  result.quarantined_mps = stats.quarantined_mps;
  result.quarantined_unprovable = stats.quarantined_unprovable;
  return result;
}

}  // namespace

extern "C" {

larder_code larder_open_pool(larder_client* client, const larder_pool_options* options,
                             larder_pool** pool) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("pool", pool)) return in.status();
    *pool = nullptr;
    in.required("client", client);
    const PoolOptions wanted = pool_options(in, options);
    if (!in.ok()) return in.status();
    auto opened = client->client->open_pool(wanted);
    if (!opened) return opened.status();
    auto state = std::make_shared<PoolState>(PoolState{client->client, std::move(*opened)});
    *pool = new larder_pool{std::move(state)};
    return {};
  });
}

void larder_pool_destroy(larder_pool* pool) { delete pool; }

larder_code larder_pool_get_info(const larder_pool* pool, larder_pool_info* info) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const size_t bytes = in.struct_bytes("info", info);
    if (!in.ok()) return in.status();
    const Pool& open = pool->state->pool;
    const larder_pool_info full = {sizeof full,
                                   to_c(open.geometry()),
                                   static_cast<larder_execution>(open.execution()),
                                   open.created() ? 1 : 0,
                                   open.num_blocks(),
                                   open.page_bytes(),
                                   open.block_stride_bytes(),
                                   open.layer_stride_bytes(),
                                   open.max_blocks(),
                                   open.num_groups(),
                                   open.unit_tokens()};
    write_struct(full, info, bytes);
    return {};
  });
}

larder_code larder_pool_data(larder_pool* pool, void** data) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    in.required("data", data);
    if (!in.ok()) return in.status();
    auto mapped = pool->state->pool.data();
    if (mapped) *data = *mapped;
    return mapped.status();
  });
}

larder_code larder_pool_stats(larder_pool* pool, larder_group_stats* groups, size_t capacity,
                              size_t* num_groups) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    in.required("num_groups", num_groups);
    if (!in.ok()) return in.status();
    auto stats = pool->state->pool.stats();
    if (!stats) return stats.status();
    return write_array("groups", std::span<const PoolGroupStats>(*stats), groups, capacity,
                       num_groups, [](const PoolGroupStats& group) { return to_c(group); });
  });
}

larder_code larder_pool_allocate(larder_pool* pool, size_t num_blocks, larder_block* blocks) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto room = in.output("blocks", blocks, num_blocks);
    if (!in.ok()) return in.status();
    auto allocated = pool->state->pool.allocate(static_cast<int64_t>(num_blocks));
    if (!allocated) return allocated.status();
    if (Status s = expect_count("blocks", allocated->size(), num_blocks); !s.ok()) return s;
    std::transform(allocated->begin(), allocated->end(), room.begin(),
                   [](const BlockHandle& block) { return to_c(block); });
    return {};
  });
}

larder_code larder_pool_release(larder_pool* pool, const larder_block* blocks, size_t num_blocks) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto given = in.blocks("blocks", blocks, num_blocks);
    if (!in.ok()) return in.status();
    return pool->state->pool.release(given);
  });
}

larder_code larder_pool_publish(larder_pool* pool, const int32_t* tokens, size_t num_tokens,
                                const larder_block* blocks, size_t num_blocks, const char* adapter,
                                const larder_bytes* extra, size_t num_extra,
                                larder_published_block* published) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto token_ids = in.array("tokens", tokens, num_tokens);
    const auto given = in.blocks("blocks", blocks, num_blocks);
    const auto extras = in.strings("extra", extra, num_extra);
    if (!in.ok()) return in.status();
    auto result = pool->state->pool.publish(token_ids, given, text_or(adapter, ""), extras);
    if (!result || published == nullptr) return result.status();
    if (Status s = expect_count("keys", result->size(), num_blocks); !s.ok()) return s;
    for (size_t i = 0; i < num_blocks; ++i) published[i] = to_c((*result)[i]);
    return {};
  });
}

larder_code larder_pool_lookup(larder_pool* pool, const int32_t* tokens, size_t num_tokens,
                               int32_t hold, const char* adapter, const larder_bytes* extra,
                               size_t num_extra, larder_block* blocks, size_t capacity,
                               size_t* num_blocks, int64_t* hit_tokens) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto token_ids = in.array("tokens", tokens, num_tokens);
    const auto extras = in.strings("extra", extra, num_extra);
    const bool holds = in.flag("hold", hold);
    in.required("num_blocks", num_blocks);
    in.required("hit_tokens", hit_tokens);
    if (!in.ok()) return in.status();
    // What is held must have a place, so the room is asked for before the daemon is.
    const size_t most = num_tokens / static_cast<size_t>(pool->state->pool.geometry().block_tokens);
    if (holds || blocks != nullptr) in.room("blocks", blocks, capacity, most);
    if (!in.ok()) {
      *num_blocks = most;
      return in.status();
    }
    auto prefix = pool->state->pool.lookup(token_ids, holds, text_or(adapter, ""), extras);
    if (!prefix) return prefix.status();
    if (prefix->blocks.size() > most) return expect_count("blocks", prefix->blocks.size(), most);
    *num_blocks = prefix->blocks.size();
    *hit_tokens = prefix->hit_tokens;
    if (blocks != nullptr)
      std::transform(prefix->blocks.begin(), prefix->blocks.end(), blocks,
                     [](const BlockHandle& block) { return to_c(block); });
    return {};
  });
}

larder_code larder_pool_copy(larder_pool* pool, const larder_block* from, const larder_block* to,
                             size_t num_blocks) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto sources = in.blocks("from", from, num_blocks);
    const auto targets = in.blocks("to", to, num_blocks);
    if (!in.ok()) return in.status();
    return pool->state->pool.copy(sources, targets);
  });
}

larder_code larder_pool_read_pages(larder_pool* pool, int32_t layer, const int32_t* blocks,
                                   size_t num_blocks, void* bytes, size_t size_bytes) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto ids = in.array("blocks", blocks, num_blocks);
    const auto out = in.output("bytes", static_cast<std::byte*>(bytes), size_bytes);
    if (!in.ok()) return in.status();
    return pool->state->pool.read_pages(layer, ids, out);
  });
}

larder_code larder_pool_write_pages(larder_pool* pool, int32_t layer, const int32_t* blocks,
                                    size_t num_blocks, const void* bytes, size_t size_bytes) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto ids = in.array("blocks", blocks, num_blocks);
    const auto from = in.array("bytes", static_cast<const std::byte*>(bytes), size_bytes);
    if (!in.ok()) return in.status();
    return pool->state->pool.write_pages(layer, ids, from);
  });
}

larder_code larder_pool_read_blocks(larder_pool* pool, const int32_t* blocks, size_t num_blocks,
                                    void* bytes, size_t size_bytes) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto ids = in.array("blocks", blocks, num_blocks);
    const auto out = in.output("bytes", static_cast<std::byte*>(bytes), size_bytes);
    if (!in.ok()) return in.status();
    return pool->state->pool.read_blocks(ids, out);
  });
}

larder_code larder_pool_write_blocks(larder_pool* pool, const int32_t* blocks, size_t num_blocks,
                                     const void* bytes, size_t size_bytes) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto ids = in.array("blocks", blocks, num_blocks);
    const auto from = in.array("bytes", static_cast<const std::byte*>(bytes), size_bytes);
    if (!in.ok()) return in.status();
    return pool->state->pool.write_blocks(ids, from);
  });
}

larder_code larder_pool_export_pages(larder_pool* pool, int32_t layer, const int32_t* blocks,
                                     size_t num_blocks, const larder_paged_kv* paged) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto ids = in.array("blocks", blocks, num_blocks);
    const PagedKv target = in.paged_kv(paged);
    if (!in.ok()) return in.status();
    return pool->state->pool.export_pages(layer, ids, target);
  });
}

larder_code larder_pool_import_pages(larder_pool* pool, int32_t layer, const int32_t* blocks,
                                     size_t num_blocks, const larder_paged_kv* paged) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto ids = in.array("blocks", blocks, num_blocks);
    const PagedKv source = in.paged_kv(paged);
    if (!in.ok()) return in.status();
    return pool->state->pool.import_pages(layer, ids, source);
  });
}

larder_code larder_pool_scrub(larder_pool* pool, const int32_t* blocks, size_t num_blocks) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto ids = in.array("blocks", blocks, num_blocks);
    if (!in.ok()) return in.status();
    return pool->state->pool.scrub(ids);
  });
}

larder_code larder_pool_checksum(larder_pool* pool, const int32_t* blocks, size_t num_blocks,
                                 uint64_t* figures) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const auto ids = in.array("blocks", blocks, num_blocks);
    const auto out = in.output("figures", figures, num_blocks);
    if (!in.ok()) return in.status();
    auto sums = pool->state->pool.checksum(ids);
    if (!sums) return sums.status();
    if (Status s = expect_count("figures", sums->size(), num_blocks); !s.ok()) return s;
    std::copy(sums->begin(), sums->end(), out.begin());
    return {};
  });
}

}  // extern "C"
