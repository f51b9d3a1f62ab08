// Calls on request about whole blocks: pages in and out, scrub, checksum.
#include <algorithm>

#include "daemon/submission_call.h"
#include "kernels/kernel_table.h"

namespace larder::daemon {
namespace {

using Access = Status (SubmissionCall::*)(const std::string& what, int64_t block) const;

// The call's block ids, all in the pool and within the session's rights.
Result<std::vector<int32_t>> copy_blocks(const SubmissionCall& call, Access access) {
  auto blocks =
      call.copy_table<int32_t>("blocks", call.record.blocks, protocol::kMaxTableEntriesPerCall);
  if (!blocks) return blocks;
  const int64_t num_blocks = call.group.layout.num_ids();
  for (size_t i = 0; i < blocks->size(); ++i) {
    const int32_t block = (*blocks)[i];
    const std::string what = "blocks[" + std::to_string(i) + "]";
    if (block < 0 || block >= num_blocks)
      return invalid(what + " is " + std::to_string(block) + ": the pool has " +
                     std::to_string(num_blocks) + " blocks");
    if (Status status = (call.*access)(what, block); !status.ok()) return status;
  }
  return blocks;
}

// Ids may repeat, so that a short list could ask for endless work.
Status check_block_bytes(const kernels::BlocksView& view, size_t count) {
  const int64_t block_bytes = view.layer_bytes * view.num_layers;
  const int64_t most = std::max<int64_t>(protocol::kMaxBlockBytesPerCall / block_bytes, 1);
  if (static_cast<int64_t>(count) <= most) return {};
  return invalid("blocks has " + std::to_string(count) + " entries of " +
                 std::to_string(block_bytes) + " bytes, at most " + std::to_string(most) +
                 " go in one call");
}

kernels::BlocksView blocks_of(const SubmissionCall& call) {
  return view_blocks(call.group.view, call.group.layout, call.group.memory->base());
}

// The pages of the blocks in one layer, in the pool and in the arena.
Result<SubmissionWork> move_pages(const SubmissionCall& call, Access access, bool to_pool) {
  const auto blocks = copy_blocks(call, access);
  if (!blocks) return blocks.status();
  const auto bytes =
      call.view_array<std::byte>("bytes", call.record.bytes, protocol::kMaxArenaBytes);
  if (!bytes) return bytes.status();
  const kernels::BlocksView view = blocks_of(call);
  const auto page_bytes = static_cast<size_t>(view.layer_bytes);
  // Both numbers are small enough: the arena holds the list.
  if (bytes->size() != blocks->size() * page_bytes)
    return invalid("bytes has " + std::to_string(bytes->size()) + " entries, " +
                   std::to_string(blocks->size()) + " pages of " + std::to_string(page_bytes) +
                   " bytes were named");
  std::byte* layer = view.base + call.record.layer * view.layer_stride_bytes;
  std::vector<kernels::ByteCopy> copies;
  for (size_t i = 0; i < blocks->size(); ++i) {
    std::byte* const page = layer + (*blocks)[i] * view.block_stride_bytes;
    std::byte* const in_arena = bytes->data() + i * page_bytes;
    copies.push_back({to_pool ? page : in_arena, to_pool ? in_arena : page, page_bytes});
  }
  if (Status status = kernels::copy_bytes_on(call.group.device, copies); !status.ok())
    return status;
  return SubmissionWork{};
}

}  // namespace

Result<SubmissionWork> run_read_pages(const SubmissionCall& call) {
  return move_pages(call, &SubmissionCall::may_read, false);
}

Result<SubmissionWork> run_write_pages(const SubmissionCall& call) {
  return move_pages(call, &SubmissionCall::may_write, true);
}

Result<SubmissionWork> run_scrub(const SubmissionCall& call) {
  const auto blocks = copy_blocks(call, &SubmissionCall::may_write);
  if (!blocks) return blocks.status();
  if (Status s = check_block_bytes(blocks_of(call), blocks->size()); !s.ok()) return s;
  const kernels::ScrubParams params{blocks_of(call), blocks->data(),
                                    static_cast<int64_t>(blocks->size())};
  if (Status status = kernels::run_on(call.group.device, params); !status.ok()) return status;
  return SubmissionWork{};
}

Result<SubmissionWork> run_checksum(const SubmissionCall& call) {
  const auto blocks = copy_blocks(call, &SubmissionCall::may_read);
  if (!blocks) return blocks.status();
  const auto checksums =
      call.view_array<uint64_t>("bytes", call.record.bytes, protocol::kMaxTableEntriesPerCall);
  if (!checksums) return checksums.status();
  if (checksums->size() != blocks->size())
    return invalid("bytes has room for " + std::to_string(checksums->size()) + " checksums, " +
                   std::to_string(blocks->size()) + " blocks were named");
  if (Status s = check_block_bytes(blocks_of(call), blocks->size()); !s.ok()) return s;
  const kernels::ChecksumParams params{blocks_of(call), blocks->data(),
                                       static_cast<int64_t>(blocks->size()), checksums->data()};
  if (Status status = kernels::run_on(call.group.device, params); !status.ok()) return status;
  return SubmissionWork{};
}

}  // namespace larder::daemon
