// Pool: its parts, its figures, and what it says of itself.
#include <algorithm>

#include "client/client_impl.h"

namespace larder {
namespace {

PoolGroupStats from_wire(const protocol::GroupInfo& info) {
  PoolGroupStats stats;
  stats.name = info.name;
  stats.capacity = info.capacity;
  stats.free = info.free;
  stats.open = info.open;
  stats.published = info.published;
  stats.cached = info.cached;
  stats.quarantined = info.quarantined;
  stats.physical_bytes = info.physical_bytes;
  stats.used_bytes = info.used_bytes;
  stats.slack_bytes = info.slack_bytes;
  stats.max_blocks = info.max_blocks;
  stats.evictable = info.evictable;
  stats.leaving_bytes = info.leaving_bytes;
  stats.quarantined_pidfd = info.quarantined_pidfd;
  stats.quarantined_mps = info.quarantined_mps;
  stats.quarantined_unprovable = info.quarantined_unprovable;
  stats.quarantined_executor_only = info.quarantined_executor_only;
  return stats;
}

Result<ResizeResult> from_wire(const Result<protocol::Resized>& reply) {
  if (!reply) return reply.status();
  return ResizeResult{reply->blocks_before, reply->blocks_after, reply->bytes_before,
                      reply->bytes_after};
}

}  // namespace

OpenedPool::OpenedPool(Client::Impl* owner, uint64_t pool_id) : client(owner), id(pool_id) {
  ++client->num_open[id];
}

OpenedPool::~OpenedPool() {
  groups.clear();  // unmaps
  const auto uses = client->num_open.find(id);
  if (--uses->second > 0) return;
  client->num_open.erase(uses);
  try {
    (void)client->session->call(protocol::ClosePool{id}, Session::Patience::kEnd);
  } catch (...) {  // the end of the session does the same
  }
}

Pool::Impl::Impl(OpenedPool& opened_pool, bool was_created, Execution where, uint32_t group_index,
                 GroupView group_view, protocol::GroupLayout group_layout)
    : opened(opened_pool),
      client(opened_pool.client),
      id(opened_pool.id),
      created(was_created),
      execution(where),
      group(group_index),
      view(std::move(group_view)),
      layout(std::move(group_layout)),
      memory(layout) {
  client->memories.add(id, group, &memory);
}

Pool::Impl::~Impl() { client->memories.remove(id, group, &memory); }

Pool::Pool(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Pool::Pool(Pool&&) noexcept = default;
Pool& Pool::operator=(Pool&& other) noexcept {
  Pool old(std::move(impl_));  // closes what this one had open
  impl_ = std::move(other.impl_);
  return *this;
}
Pool::~Pool() = default;

const AttentionGeometry& Pool::geometry() const { return impl_->view.geometry; }
const std::string& Pool::device() const { return impl_->opened.device; }
Execution Pool::execution() const { return impl_->execution; }
int64_t Pool::num_blocks() const { return impl_->layout.num_blocks; }
int64_t Pool::max_blocks() const { return impl_->layout.num_ids(); }
bool Pool::created() const { return impl_->created; }
int64_t Pool::block_stride_bytes() const { return impl_->layout.block_stride_bytes; }
int64_t Pool::layer_stride_bytes() const { return impl_->layout.layer_stride_bytes; }
int32_t Pool::num_groups() const { return static_cast<int32_t>(impl_->opened.groups.size()); }
int64_t Pool::unit_tokens() const { return impl_->opened.unit_tokens; }
int64_t Pool::blocks_per_unit(int32_t group) const {
  const std::vector<size_t>& counts = impl_->opened.per_unit;
  const auto index = static_cast<size_t>(group);  // negative: past the end
  return index < counts.size() ? static_cast<int64_t>(counts[index]) : 0;
}

Result<Pool> Pool::group(int32_t index) {
  if (index < 0 || index >= num_groups())
    return Status(
        ErrorCode::kInvalidArgument,
        "group is " + std::to_string(index) + ", the pool has " + std::to_string(num_groups()));
  Impl* const group = impl_->opened.groups[static_cast<size_t>(index)].get();
  return Pool(std::shared_ptr<Impl>(impl_, group));
}

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
                    std::span<const int64_t> slots, const AppendOptions& options) {
  return impl_->append(layer, k, v, slots, options);
}
Status Pool::attend(int32_t layer, const AttendBatch& batch, const AttendOptions& options) {
  return impl_->attend(layer, batch, options);
}

Result<ResizeResult> Pool::resize(int64_t num_blocks) {
  return from_wire(impl_->client->session->call_for<protocol::Resized>(
      protocol::ResizePool{impl_->id, impl_->group, num_blocks}));
}

Result<ResizeResult> Pool::evict(int64_t num_blocks) {
  return from_wire(
      impl_->client->session->call_for<protocol::Resized>(protocol::Evict{impl_->id, num_blocks}));
}

Result<std::vector<PoolGroupStats>> Pool::stats() {
  auto page = impl_->client->session->call_for<protocol::Pools>(protocol::ListPools{impl_->id - 1});
  if (!page) return page.status();
  if (page->pools.empty() || page->pools[0].pool != impl_->id)
    return Status(ErrorCode::kNotFound, "pool " + std::to_string(impl_->id) + " is gone");
  std::vector<PoolGroupStats> stats;
  for (const protocol::GroupInfo& group : page->pools[0].groups) stats.push_back(from_wire(group));
  return stats;
}

kernels::LayerView Pool::Impl::layer(int32_t index) const {
  kernels::LayerView result = view_layer(view, layout, memory.base(), index);
  if (key_offsets.memory != nullptr)
    result.key_offset = reinterpret_cast<const float*>(key_offsets.memory.get()) +
                        (result.key_offset - view.key_offsets.data());
  return result;
}

Status Pool::Impl::check_layer(int32_t index) const {
  if (Status status = client->session->ended(); !status.ok()) return status;
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
  record.group = group;
  record.layer = static_cast<uint32_t>(layer_index);
  return record;
}

}  // namespace larder
