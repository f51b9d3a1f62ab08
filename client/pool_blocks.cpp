// Whole blocks of a pool: pages in and out, foreign layouts, scrub, checksum.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "client/client_impl.h"
#include "kernels/kernel_table.h"
#include "protocol/limits.h"

namespace larder {

int64_t Pool::page_bytes() const { return impl_->view.page.page_bytes; }
int64_t Pool::block_bytes() const { return larder::block_bytes(impl_->view); }

Status Pool::Impl::check_pages(int32_t layer_index, std::span<const int32_t> blocks,
                               size_t num_bytes) const {
  if (Status status = client->session->ended(); !status.ok()) return status;
  if (layer_index < 0 || layer_index >= view.geometry.num_layers)
    return {ErrorCode::kInvalidArgument, "layer is " + std::to_string(layer_index) +
                                             ", the pool has " +
                                             std::to_string(view.geometry.num_layers)};
  return check_ids(blocks, num_bytes, "pages", view.page.page_bytes);
}

Status Pool::Impl::check_blocks(std::span<const int32_t> blocks, size_t num_bytes) const {
  if (Status status = client->session->ended(); !status.ok()) return status;
  return check_ids(blocks, num_bytes, "blocks", larder::block_bytes(view));
}

Status Pool::Impl::check_ids(std::span<const int32_t> blocks, size_t num_bytes, const char* what,
                             int64_t bytes_of_each) const {
  for (size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i] < 0 || blocks[i] >= layout.num_ids())
      return {ErrorCode::kInvalidArgument, "blocks[" + std::to_string(i) + "] is " +
                                               std::to_string(blocks[i]) + ": the pool has " +
                                               std::to_string(layout.num_ids()) + " blocks"};
  const auto each = static_cast<size_t>(bytes_of_each);
  if (num_bytes % each == 0 && num_bytes / each == blocks.size()) return {};
  return {ErrorCode::kInvalidArgument, "bytes has " + std::to_string(num_bytes) + " entries, " +
                                           std::to_string(blocks.size()) + " " + what + " of " +
                                           std::to_string(each) + " bytes were named"};
}

std::byte* Pool::Impl::page(int32_t layer_index, int32_t block) const {
  return memory.base() + layer_index * layout.layer_stride_bytes +
         block * layout.block_stride_bytes;
}

// Portions of blocks that fit the arena, staged by `before` and fetched by `after`.
template <typename Before, typename After>
Status Pool::Impl::in_block_portions(protocol::Op op, int32_t layer_index,
                                     std::span<const int32_t> blocks, int64_t bytes_of_a_block,
                                     Before before, After after) {
  RequestRing& ring = *client->ring;
  const int64_t staged = rows_that_fit(bytes_of_a_block + static_cast<int64_t>(sizeof(int32_t)));
  const int64_t allowed =
      std::max<int64_t>(protocol::kMaxBlockBytesPerCall / larder::block_bytes(view), 1);
  const auto portion = static_cast<size_t>(std::min(staged, allowed));
  for (size_t first = 0; first < blocks.size(); first += portion) {
    const auto part = blocks.subspan(first, std::min(portion, blocks.size() - first));
    const auto deadline = client->deadline();
    if (Status status = client->start_ring(deadline); !status.ok()) return status;
    protocol::Submission record = submission(op, layer_index);
    auto ids = ring.stage(part.data(), part.size());
    if (!ids) return ids.status();
    record.blocks = *ids;
    if (Status status = before(record, first, part.size()); !status.ok()) return status;
    if (Status status = client->run(record, deadline); !status.ok()) return status;
    after(record, first, part.size());
  }
  return {};
}

Status Pool::Impl::read_pages(int32_t layer_index, std::span<const int32_t> blocks,
                              std::span<std::byte> bytes) {
  if (Status s = check_pages(layer_index, blocks, bytes.size()); !s.ok()) return s;
  const auto page_bytes = static_cast<size_t>(view.page.page_bytes);
  if (execution == Execution::kInProcess) {
    if (Status status = check_mapped("blocks", blocks); !status.ok()) return status;
    std::vector<kernels::ByteCopy> copies;
    for (size_t i = 0; i < blocks.size(); ++i)
      copies.push_back({bytes.data() + i * page_bytes, page(layer_index, blocks[i]), page_bytes});
    return kernels::copy_bytes_on(calls, copies);
  }
  RequestRing& ring = *client->ring;
  return in_block_portions(
      protocol::Op::kReadPages, layer_index, blocks, view.page.page_bytes,
      [&](protocol::Submission& record, size_t, size_t count) -> Status {
        auto room = ring.reserve(count * page_bytes);
        if (!room) return room.status();
        record.bytes = {room->offset_bytes, count * page_bytes};
        return {};
      },
      [&](const protocol::Submission& record, size_t first, size_t) {
        ring.copy_out(record.bytes, bytes.data() + first * page_bytes);
      });
}

Status Pool::Impl::write_pages(int32_t layer_index, std::span<const int32_t> blocks,
                               std::span<const std::byte> bytes) {
  if (Status s = check_pages(layer_index, blocks, bytes.size()); !s.ok()) return s;
  const auto page_bytes = static_cast<size_t>(view.page.page_bytes);
  if (execution == Execution::kInProcess) {
    if (Status status = check_mapped("blocks", blocks); !status.ok()) return status;
    std::vector<kernels::ByteCopy> copies;
    for (size_t i = 0; i < blocks.size(); ++i)
      copies.push_back({page(layer_index, blocks[i]), bytes.data() + i * page_bytes, page_bytes});
    return kernels::copy_bytes_on(calls, copies);
  }
  RequestRing& ring = *client->ring;
  return in_block_portions(
      protocol::Op::kWritePages, layer_index, blocks, view.page.page_bytes,
      [&](protocol::Submission& record, size_t first, size_t count) -> Status {
        auto staged = ring.stage(bytes.data() + first * page_bytes, count * page_bytes);
        if (!staged) return staged.status();
        record.bytes = *staged;
        return {};
      },
      [](const protocol::Submission&, size_t, size_t) {});
}

Status Pool::read_pages(int32_t layer, std::span<const int32_t> blocks,
                        std::span<std::byte> bytes) {
  return impl_->read_pages(layer, blocks, bytes);
}
Status Pool::write_pages(int32_t layer, std::span<const int32_t> blocks,
                         std::span<const std::byte> bytes) {
  return impl_->write_pages(layer, blocks, bytes);
}

// On request layer by layer: what the arena's calls move is pages.
Status Pool::Impl::move_blocks(std::span<const int32_t> blocks, std::byte* bytes, size_t num_bytes,
                               bool to_pool) {
  if (Status status = check_blocks(blocks, num_bytes); !status.ok()) return status;
  if (execution == Execution::kInProcess) {
    if (Status status = check_mapped("blocks", blocks); !status.ok()) return status;
    return kernels::copy_blocks_on(calls, view_blocks(view, layout, memory.base()), blocks, bytes,
                                   to_pool);
  }
  const auto page_bytes = static_cast<size_t>(view.page.page_bytes);
  const auto stride = static_cast<size_t>(larder::block_bytes(view));
  std::vector<std::byte> pages(blocks.size() * page_bytes);
  for (int32_t index = 0; index < view.geometry.num_layers; ++index) {
    std::byte* first = bytes + static_cast<size_t>(index) * page_bytes;
    if (to_pool)
      for (size_t i = 0; i < blocks.size(); ++i)
        std::memcpy(pages.data() + i * page_bytes, first + i * stride, page_bytes);
    Status status = to_pool ? write_pages(index, blocks, pages) : read_pages(index, blocks, pages);
    if (!status.ok()) return status;
    if (!to_pool)
      for (size_t i = 0; i < blocks.size(); ++i)
        std::memcpy(first + i * stride, pages.data() + i * page_bytes, page_bytes);
  }
  return {};
}

Status Pool::read_blocks(std::span<const int32_t> blocks, std::span<std::byte> bytes) {
  return impl_->move_blocks(blocks, bytes.data(), bytes.size(), false);
}
Status Pool::write_blocks(std::span<const int32_t> blocks, std::span<const std::byte> bytes) {
  // Only read where they go to the pool.
  return impl_->move_blocks(blocks, const_cast<std::byte*>(bytes.data()), bytes.size(), true);
}

// On request the pages travel as they are and are converted here: the same code, either way.
Status Pool::Impl::convert_pages(int32_t layer_index, std::span<const int32_t> blocks,
                                 const PagedKv& paged, bool to_pool) {
  if (Status status = check_layer(layer_index); !status.ok()) return status;
  kernels::ConvertParams params;
  params.layer = layer(layer_index);
  params.blocks = blocks.data();
  params.num_blocks = static_cast<int64_t>(blocks.size());
  params.paged = paged;
  params.to_pool = to_pool;
  if (execution == Execution::kInProcess) {
    if (Status status = check_mapped("blocks", blocks); !status.ok()) return status;
    return run_here(params);
  }
  if (Status status = kernels::validate_convert(params); !status.ok()) return status;
  std::vector<std::byte> pages(blocks.size() * static_cast<size_t>(view.page.page_bytes));
  std::vector<int32_t> ids(blocks.size());
  std::iota(ids.begin(), ids.end(), 0);
  params.layer.base = pages.data();
  params.layer.block_stride_bytes = view.page.page_bytes;
  params.layer.num_blocks = params.num_blocks;
  params.blocks = ids.data();
  if (!to_pool) {
    if (Status status = read_pages(layer_index, blocks, pages); !status.ok()) return status;
    return kernels::run_convert(params);
  }
  if (Status status = kernels::run_convert(params); !status.ok()) return status;
  return write_pages(layer_index, blocks, pages);
}

Status Pool::export_pages(int32_t layer, std::span<const int32_t> blocks, const PagedKv& paged) {
  return impl_->convert_pages(layer, blocks, paged, false);
}
Status Pool::import_pages(int32_t layer, std::span<const int32_t> blocks, const PagedKv& paged) {
  return impl_->convert_pages(layer, blocks, paged, true);
}

Status Pool::scrub(std::span<const int32_t> blocks) {
  if (Status status = impl_->client->session->ended(); !status.ok()) return status;
  const kernels::ScrubParams params{view_blocks(impl_->view, impl_->layout, impl_->memory.base()),
                                    blocks.data(), static_cast<int64_t>(blocks.size())};
  if (impl_->execution == Execution::kInProcess) {
    if (Status status = impl_->check_mapped("blocks", blocks); !status.ok()) return status;
    return impl_->run_here(params);
  }
  if (Status status = kernels::validate_scrub(params); !status.ok()) return status;
  return impl_->in_block_portions(
      protocol::Op::kScrub, 0, blocks, 0,
      [](protocol::Submission&, size_t, size_t) -> Status { return {}; },
      [](const protocol::Submission&, size_t, size_t) {});
}

Result<std::vector<uint64_t>> Pool::checksum(std::span<const int32_t> blocks) {
  if (Status status = impl_->client->session->ended(); !status.ok()) return status;
  std::vector<uint64_t> checksums(blocks.size());
  const kernels::ChecksumParams params{
      view_blocks(impl_->view, impl_->layout, impl_->memory.base()), blocks.data(),
      static_cast<int64_t>(blocks.size()), checksums.data()};
  if (impl_->execution == Execution::kInProcess) {
    if (Status status = impl_->check_mapped("blocks", blocks); !status.ok()) return status;
    if (Status status = impl_->run_here(params); !status.ok()) return status;
    return checksums;
  }
  if (Status status = kernels::validate_checksum(params); !status.ok()) return status;
  RequestRing& ring = *impl_->client->ring;
  const Status status = impl_->in_block_portions(
      protocol::Op::kChecksum, 0, blocks, sizeof(uint64_t),
      [&](protocol::Submission& record, size_t, size_t count) -> Status {
        auto room = ring.reserve(count * sizeof(uint64_t));
        if (!room) return room.status();
        record.bytes = {room->offset_bytes, count};
        return {};
      },
      [&](const protocol::Submission& record, size_t first, size_t) {
        ring.copy_out(record.bytes, checksums.data() + first);
      });
  if (!status.ok()) return status;
  return checksums;
}

}  // namespace larder
