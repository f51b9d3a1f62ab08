#include <algorithm>

#include "allocator/host_memory.h"
#include "client/client_impl.h"
#include "protocol/limits.h"

namespace larder {
namespace {

// Calls `part` with portions of a list that is too long for one message.
template <typename Call>
Status in_portions(size_t total, size_t portion, Call part) {
  for (size_t first = 0; first < total || first == 0; first += portion) {
    const size_t count = std::min(portion, total - first);
    if (Status status = part(first, count); !status.ok()) return status;
    if (total == 0) break;
  }
  return {};
}

PoolGroupStats from_wire(const protocol::GroupInfo& info) {
  return {info.name,   info.capacity,    info.free,           info.open,       info.published,
          info.cached, info.quarantined, info.physical_bytes, info.used_bytes, info.slack_bytes};
}

}  // namespace

Pool::Pool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Pool::Pool(Pool&&) noexcept = default;
Pool& Pool::operator=(Pool&& other) noexcept {
  Pool old(std::move(impl_));  // closes what this one had open
  impl_ = std::move(other.impl_);
  return *this;
}

Pool::~Pool() {
  if (impl_ == nullptr) return;
  impl_->memory = MappedRange();
  const auto uses = impl_->client->num_open.find(impl_->id);
  if (--uses->second > 0) return;
  impl_->client->num_open.erase(uses);
  try {
    (void)impl_->client->control.call(protocol::ClosePool{impl_->id});
  } catch (...) {  // the end of the session does the same
  }
}

const AttentionGeometry& Pool::geometry() const { return impl_->view.geometry; }
Execution Pool::execution() const { return impl_->execution; }
int64_t Pool::num_blocks() const { return impl_->layout.num_blocks; }
bool Pool::created() const { return impl_->created; }
int64_t Pool::block_stride_bytes() const { return impl_->layout.block_stride_bytes; }
int64_t Pool::layer_stride_bytes() const { return impl_->layout.layer_stride_bytes; }

Result<std::vector<BlockHandle>> Pool::allocate(int64_t num_blocks) {
  return impl_->allocate(num_blocks);
}
Status Pool::release(std::span<const BlockHandle> blocks) { return impl_->release(blocks); }
Result<std::vector<PublishedBlock>> Pool::publish(std::span<const int32_t> tokens,
                                                  std::span<const BlockHandle> blocks,
                                                  const std::string& adapter,
                                                  std::span<const std::string> extra) {
  return impl_->publish(0, tokens, blocks, adapter, extra);
}
Result<Prefix> Pool::lookup(std::span<const int32_t> tokens, bool hold, const std::string& adapter,
                            std::span<const std::string> extra) {
  return impl_->lookup(tokens, hold, adapter, extra);
}
Status Pool::copy(std::span<const BlockHandle> from, std::span<const BlockHandle> to) {
  return impl_->copy(from, to);
}
Status Pool::append(int32_t layer, const TensorView& k, const TensorView& v,
                    std::span<const int64_t> slots) {
  return impl_->append(layer, k, v, slots);
}
Status Pool::attend(int32_t layer, const AttendBatch& batch, const AttendOptions& options) {
  return impl_->attend(layer, batch, options);
}

Result<std::byte*> Pool::data() {
  if (Status status = impl_->map_memory(); !status.ok()) return status;
  return impl_->memory.base();
}

kernels::LayerView Pool::Impl::layer(int32_t index) const {
  return view_layer(view, layout, memory.base(), index);
}

Status Pool::Impl::check_layer(int32_t index) const {
  if (view.opaque)
    return {ErrorCode::kUnsupported, "the pool is opaque: its bytes have no K and V"};
  if (index >= 0 && index < view.geometry.num_layers) return {};
  return {ErrorCode::kInvalidArgument, "layer is " + std::to_string(index) + ", the pool has " +
                                           std::to_string(view.geometry.num_layers)};
}

Status check_table(int64_t num_seqs, std::span<const int32_t> table, int64_t stride) {
  // Divided, not multiplied: the stride may be any number.
  const auto num_entries = static_cast<int64_t>(table.size());
  if (stride >= 0 && (num_seqs == 0 || stride <= num_entries / num_seqs)) return {};
  return {ErrorCode::kInvalidArgument,
          "block_table has " + std::to_string(num_entries) + " entries with a stride of " +
              std::to_string(stride) + ": there are " + std::to_string(num_seqs) + " sequences"};
}

protocol::Submission Pool::Impl::submission(protocol::Op op, int32_t layer_index) const {
  protocol::Submission record;
  record.op = static_cast<uint32_t>(op);
  record.pool = id;
  record.layer = static_cast<uint32_t>(layer_index);
  return record;
}

Status Pool::Impl::map_memory() {
  if (memory.base() != nullptr) return {};
  int64_t total_bytes = 0;
  for (const int64_t bytes : layout.segment_bytes) total_bytes += bytes;
  MappedRange range = MappedRange::reserve(total_bytes);
  const auto map_portion = [&](size_t first, size_t count) -> Status {
    auto answer = client->control.call(
        protocol::OpenSegments{id, 0, static_cast<uint32_t>(first), static_cast<uint32_t>(count)});
    if (!answer) return answer.status();
    const auto* segments = std::get_if<protocol::Segments>(&answer->body);
    if (segments == nullptr || answer->fds.size() != count || segments->size_bytes.size() != count)
      return {ErrorCode::kInternal, "the daemon sent " + std::to_string(answer->fds.size()) +
                                        " segments, not " + std::to_string(count)};
    for (size_t i = 0; i < count; ++i) {
      const int64_t size_bytes = layout.segment_bytes[first + i];
      const int fd = answer->fds[i].get();
      if (Status status = check_host_segment(fd, size_bytes); !status.ok()) return status;
      range.map(fd, size_bytes, true);
    }
    return {};
  };
  Status status =
      in_portions(layout.segment_bytes.size(), protocol::kMaxFdsPerMessage, map_portion);
  if (status.ok()) memory = std::move(range);
  return status;
}

Result<std::vector<BlockHandle>> Pool::Impl::allocate(int64_t num_blocks) {
  std::vector<BlockHandle> blocks;
  const auto portion = static_cast<int64_t>(protocol::kMaxBlocksPerMessage);
  do {
    const int64_t total = num_blocks - static_cast<int64_t>(blocks.size());
    const int64_t count = std::min(portion, total);
    auto part = client->control.call_for<protocol::Blocks>(
        protocol::Allocate{id, 0, count, std::max<int64_t>(total, 0)});
    if (!part) {
      if (!blocks.empty()) (void)release(blocks);  // all or nothing
      return part.status();
    }
    for (const protocol::Block& block : part->blocks)
      blocks.push_back({block.id, block.generation});
  } while (static_cast<int64_t>(blocks.size()) < num_blocks);
  return blocks;
}

Status Pool::Impl::release(std::span<const BlockHandle> blocks) {
  return in_portions(blocks.size(), protocol::kMaxBlocksPerMessage,
                     [&](size_t first, size_t count) -> Status {
                       return client->control
                           .call_for<protocol::Done>(
                               protocol::Release{id, 0, to_wire(blocks.subspan(first, count))})
                           .status();
                     });
}

Result<std::vector<PublishedBlock>> Pool::Impl::publish(int64_t first_block,
                                                        std::span<const int32_t> tokens,
                                                        std::span<const BlockHandle> blocks,
                                                        const std::string& adapter,
                                                        std::span<const std::string> extra) {
  std::vector<PublishedBlock> result;
  const auto publish_portion = [&](size_t first, size_t count) -> Status {
    auto list = client->token_list(tokens);
    if (!list) return list.status();
    auto part = client->control.call_for<protocol::Published>(
        protocol::Publish{id,
                          adapter,
                          std::move(*list),
                          to_wire(blocks.subspan(first, count)),
                          {extra.begin(), extra.end()},
                          first_block + static_cast<int64_t>(first)});
    if (!part) return part.status();
    for (const protocol::PublishedBlock& block : part->blocks)
      result.push_back({block.key, {block.block.id, block.block.generation}});
    return {};
  };
  Status status = in_portions(blocks.size(), protocol::kMaxBlocksPerPublish, publish_portion);
  if (status.ok()) return result;
  // Holds on blocks that the caller will not hear of.
  std::vector<BlockHandle> gained;
  for (size_t i = 0; i < result.size(); ++i)
    if (result[i].block != blocks[i]) gained.push_back(result[i].block);
  if (!gained.empty()) (void)release(gained);
  return status;
}

Result<Prefix> Pool::Impl::lookup(std::span<const int32_t> tokens, bool hold,
                                  const std::string& adapter, std::span<const std::string> extra) {
  Prefix prefix;
  while (true) {
    auto list = client->token_list(tokens);
    if (!list) return list.status();
    const auto first_block = static_cast<int64_t>(prefix.blocks.size());
    auto part = client->control.call_for<protocol::Prefix>(protocol::Lookup{
        id, adapter, std::move(*list), {extra.begin(), extra.end()}, hold, first_block});
    if (!part) {
      if (hold && !prefix.blocks.empty()) (void)release(prefix.blocks);
      return part.status();
    }
    for (const protocol::Block& block : part->blocks)
      prefix.blocks.push_back({block.id, block.generation});
    prefix.hit_tokens = static_cast<int64_t>(prefix.blocks.size()) * view.geometry.block_tokens;
    if (part->blocks.size() < protocol::kMaxBlocksPerMessage) return prefix;
  }
}

Status Pool::Impl::copy(std::span<const BlockHandle> from, std::span<const BlockHandle> to) {
  if (from.size() != to.size())
    return {ErrorCode::kInvalidArgument, "from has " + std::to_string(from.size()) +
                                             " blocks and to " + std::to_string(to.size())};
  return in_portions(
      from.size(), protocol::kMaxBlocksPerCopy, [&](size_t first, size_t count) -> Status {
        return client->control
            .call_for<protocol::Done>(protocol::Copy{id, 0, to_wire(from.subspan(first, count)),
                                                     to_wire(to.subspan(first, count))})
            .status();
      });
}

Result<std::vector<PoolGroupStats>> Pool::stats() {
  auto page = impl_->client->control.call_for<protocol::Pools>(protocol::ListPools{impl_->id - 1});
  if (!page) return page.status();
  if (page->pools.empty() || page->pools[0].pool != impl_->id)
    return Status(ErrorCode::kNotFound, "pool " + std::to_string(impl_->id) + " is gone");
  std::vector<PoolGroupStats> stats;
  for (const protocol::GroupInfo& group : page->pools[0].groups) stats.push_back(from_wire(group));
  return stats;
}

}  // namespace larder
