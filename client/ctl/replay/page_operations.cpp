#include <cstring>

#include "client/ctl/replay/operations.h"
#include "client/ctl/replay/references.h"

namespace larder::replay {
namespace {

// Stretches of bytes of one page, in the order in which a step names them.
struct Stretch {
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
};

struct RegionShape {
  int64_t offset_bytes = 0;
  int64_t row_bytes = 0;  // of one token and head
};

std::vector<RegionShape> regions_of(const OpenedPool& pool, Region region) {
  const AttentionGeometry& geometry = pool.options.geometry;
  const PageLayout layout = page_layout(geometry);
  if (is_mla(pool)) return {{0, mla_row_bytes(geometry.mla_row)}};
  const RegionShape all[] = {
      {layout.k_data_offset_bytes, row_data_bytes(geometry.k_format, geometry.k_dim)},
      {layout.k_scale_offset_bytes, row_scale_bytes(geometry.k_format, geometry.k_dim)},
      {layout.v_data_offset_bytes, row_data_bytes(geometry.v_format, geometry.v_dim)},
      {layout.v_scale_offset_bytes, row_scale_bytes(geometry.v_format, geometry.v_dim)}};
  if (region == Region::kAll) return {std::begin(all), std::end(all)};
  return {all[static_cast<size_t>(region) - static_cast<size_t>(Region::kKData)]};
}

std::vector<Stretch> block_stretches(const OpenedPool& pool, Region region) {
  if (pool.options.opaque_block_bytes > 0) return {{0, pool.options.opaque_block_bytes}};
  const AttentionGeometry& geometry = pool.options.geometry;
  std::vector<Stretch> stretches;
  for (const RegionShape& shape : regions_of(pool, region))
    stretches.push_back(
        {shape.offset_bytes, shape.row_bytes * geometry.num_kv_heads * geometry.block_tokens});
  return stretches;
}

// One token: all its heads, region after region.
std::vector<Stretch> token_stretches(const OpenedPool& pool, Region region, int64_t token) {
  const AttentionGeometry& geometry = pool.options.geometry;
  std::vector<Stretch> stretches;
  for (const RegionShape& shape : regions_of(pool, region))
    for (int64_t head = 0; head < geometry.num_kv_heads; ++head)
      stretches.push_back(
          {shape.offset_bytes + (head * geometry.block_tokens + token) * shape.row_bytes,
           shape.row_bytes});
  return stretches;
}

Status check_region(const OpenedPool& pool, const RawBytes& step) {
  const bool is_opaque = pool.options.opaque_block_bytes > 0;
  if (is_opaque && std::holds_alternative<SlotList>(step.where))
    return {ErrorCode::kInvalidArgument, "slots are given, but an opaque pool has no tokens"};
  const bool takes =
      step.region == Region::kAll || (!is_opaque && (step.region == Region::kRow) == is_mla(pool));
  if (takes) return {};
  return {ErrorCode::kInvalidArgument,
          std::string("what is not of this pool, expected ") +
              (is_opaque      ? "\"all\""
               : is_mla(pool) ? "\"all\" or \"row\""
                              : "\"all\", \"k_data\", \"k_scale\", \"v_data\" or \"v_scale\"")};
}

// A block and what of it is meant.
struct Target {
  int32_t block = 0;
  std::vector<Stretch> stretches;
};

Result<std::vector<Target>> targets_of(const RawBytes& step, const OpenedPool& pool,
                                       const Context& context) {
  std::vector<Target> targets;
  if (const auto* list = std::get_if<BlockList>(&step.where)) {
    const auto blocks = resolve_ids(*list, context);
    if (!blocks) return blocks.status();
    for (const int32_t block : *blocks)
      targets.push_back({block, block_stretches(pool, step.region)});
    return targets;
  }
  const int64_t block_tokens = pool.options.geometry.block_tokens;
  const auto slots = resolve_slots(std::get<SlotList>(step.where), block_tokens, context);
  if (!slots) return slots.status();
  const int64_t num_slots = pool.pool.max_blocks() * block_tokens;
  for (const int64_t slot : *slots) {
    if (slot < 0 || slot >= num_slots)
      return Status(ErrorCode::kInvalidArgument, "slot " + std::to_string(slot) +
                                                     " is not in the pool, which has " +
                                                     std::to_string(num_slots));
    targets.push_back({static_cast<int32_t>(slot / block_tokens),
                       token_stretches(pool, step.region, slot % block_tokens)});
  }
  return targets;
}

Status check_layer(const OpenedPool& pool, int32_t layer) {
  const bool is_opaque = pool.options.opaque_block_bytes > 0;
  const int32_t num_layers = is_opaque ? 1 : pool.options.geometry.num_layers;
  if (layer >= 0 && layer < num_layers) return {};
  return {ErrorCode::kInvalidArgument, "layer is " + std::to_string(layer) + ", the pool has " +
                                           std::to_string(num_layers) + " layers"};
}

constexpr int64_t kMaxBytes = int64_t{1} << 28;  // of one step's result

Result<int64_t> total_bytes(const std::vector<Target>& targets) {
  int64_t total = 0;
  for (const Target& target : targets)
    for (const Stretch& stretch : target.stretches) {
      total += stretch.size_bytes;
      if (total > kMaxBytes)
        return Status(ErrorCode::kInvalidArgument,
                      "more than " + std::to_string(kMaxBytes) + " bytes are wanted in one step");
    }
  return total;
}

Result<std::vector<uint8_t>> read_page(Pool& source, int32_t layer, int32_t block) {
  std::vector<uint8_t> page(static_cast<size_t>(source.page_bytes()));
  const Status status =
      source.read_pages(layer, std::span(&block, 1), std::as_writable_bytes(std::span(page)));
  if (!status.ok()) return status;
  return page;
}

Outcome write_targets(const RawBytes& step, const std::vector<Target>& targets, int64_t total,
                      const Context& context, Pool& source) {
  ByteString written;
  if (const auto* byte = std::get_if<uint8_t>(&*step.written)) {
    written.assign(static_cast<size_t>(total), *byte);
  } else {
    auto bytes = resolve_bytes(std::get<HexSource>(*step.written), context);
    if (!bytes) return {bytes.status(), {}};
    written = std::move(*bytes);
  }
  if (static_cast<int64_t>(written.size()) != total)
    return refused(ErrorCode::kInvalidArgument, "hex has " + std::to_string(written.size()) +
                                                    " bytes, " + std::to_string(total) +
                                                    " are written");
  size_t next = 0;
  for (const Target& target : targets) {
    auto page = read_page(source, step.layer, target.block);
    if (!page) return {page.status(), {}};
    for (const Stretch& stretch : target.stretches) {
      const auto size = static_cast<size_t>(stretch.size_bytes);
      if (size > 0) std::memcpy(page->data() + stretch.offset_bytes, written.data() + next, size);
      next += size;
    }
    const Status status = source.write_pages(step.layer, std::span(&target.block, 1),
                                             std::as_bytes(std::span(*page)));
    if (!status.ok()) return {status, {}};
  }
  return {};
}

}  // namespace

// ----------------------------------------------------------------------------------- PageAccess

Result<Pool> PageAccess::open(const OpenedPool& pool) {
  if (!client_) {
    auto client = Client::connect({.socket_path = settings_.socket_path,
                                   .tenant = settings_.tenant,
                                   .token = settings_.token,
                                   .name = "replay-debug",
                                   .deadline = settings_.deadline,
                                   .arena_bytes = 0});
    if (!client) return client.status();
    client_.emplace(std::move(*client));
  }
  PoolOptions options = *pool.whole;
  options.execution = Execution::kInProcess;
  auto opened = client_->open_pool(options);
  if (!opened) return opened.status();
  return opened->group(static_cast<int32_t>(pool.group_index));
}

// ----------------------------------------------------------------------------------- operations

Outcome apply(const RawBytes& step, OpenedPool& pool, const Context& context, Pool& source) {
  if (Status status = check_layer(pool, step.layer); !status.ok()) return {status, {}};
  if (Status status = check_region(pool, step); !status.ok()) return {status, {}};
  const auto targets = targets_of(step, pool, context);
  if (!targets) return {targets.status(), {}};
  const auto total = total_bytes(*targets);
  if (!total) return {total.status(), {}};
  if (step.written) return write_targets(step, *targets, *total, context, source);
  ByteString bytes;
  bytes.reserve(static_cast<size_t>(*total));
  std::vector<uint8_t> page;
  int32_t block_of_page = -1;
  for (const Target& target : *targets) {
    if (target.block != block_of_page) {
      auto read = read_page(source, step.layer, target.block);
      if (!read) return {read.status(), {}};
      page = std::move(*read);
      block_of_page = target.block;
    }
    for (const Stretch& stretch : target.stretches)
      bytes.insert(bytes.end(), page.begin() + stretch.offset_bytes,
                   page.begin() + stretch.offset_bytes + stretch.size_bytes);
  }
  return {{}, {std::move(bytes)}};
}

Outcome apply(const MovePages& step, OpenedPool& pool, const Context& context) {
  if (pool.options.opaque_block_bytes > 0)
    return refused(ErrorCode::kInvalidArgument,
                   "an opaque pool has no layout to convert; use bytes and poke");
  const auto blocks = resolve_ids(step.blocks, context);
  if (!blocks) return {blocks.status(), {}};
  AttentionGeometry geometry = pool.options.geometry;
  const int64_t num_tokens = static_cast<int64_t>(blocks->size()) * geometry.block_tokens;
  if (step.block_tokens != 0) geometry.block_tokens = step.block_tokens;
  if (geometry.block_tokens < 0 || num_tokens % geometry.block_tokens != 0)
    return refused(ErrorCode::kInvalidArgument,
                   "block_tokens is " + std::to_string(geometry.block_tokens) +
                       ", which does not divide the " + std::to_string(num_tokens) + " tokens");
  geometry.num_layers = 1;
  const int64_t num_pages = num_tokens / geometry.block_tokens;
  const int64_t total = num_pages * page_layout(geometry).page_bytes;
  if (total > kMaxBytes)
    return refused(ErrorCode::kInvalidArgument, std::to_string(total) +
                                                    " bytes are wanted, at most " +
                                                    std::to_string(kMaxBytes) + " in one step");
  ByteString bytes(static_cast<size_t>(total));
  if (step.is_import) {
    auto given = resolve_bytes(step.hex, context);
    if (!given) return {given.status(), {}};
    if (static_cast<int64_t>(given->size()) != total)
      return refused(ErrorCode::kInvalidArgument, "hex has " + std::to_string(given->size()) +
                                                      " bytes, the blocks need " +
                                                      std::to_string(total));
    bytes = std::move(*given);
  }
  const PagedKv paged = dense_pages(reinterpret_cast<std::byte*>(bytes.data()), geometry, num_pages,
                                    step.order, step.v_scale_order);
  const Status status = step.is_import ? pool.pool.import_pages(step.layer, *blocks, paged)
                                       : pool.pool.export_pages(step.layer, *blocks, paged);
  if (!status.ok() || step.is_import) return {status, {}};
  return {{}, {std::move(bytes)}};
}

}  // namespace larder::replay
