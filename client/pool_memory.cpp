// A group's memory in this process: mapping what replies name, and refusing what is not mapped.
#include <algorithm>
#include <numeric>

#include "allocator/cuda_error.h"
#include "client/client_impl.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder {
namespace {

// How many of the first numbers follow one another, as far as one message goes.
size_t run_length(const std::vector<uint32_t>& numbers) {
  size_t length = 1;
  while (length < numbers.size() && length < protocol::kMaxFdsPerMessage &&
         numbers[length] == numbers[0] + length)
    ++length;
  return length;
}

Status not_mapped(const char* field, size_t index, int64_t value, int64_t block) {
  std::string text =
      std::string(field) + "[" + std::to_string(index) + "] is " + std::to_string(value);
  if (value != block) text += ", block " + std::to_string(block);
  return {ErrorCode::kInvalidArgument,
          text + ": the pool has no memory there now, so the block is nobody's"};
}

}  // namespace

Result<std::byte*> Pool::data() {
  if (Status status = impl_->map_memory(); !status.ok()) return status;
  return impl_->memory.base();
}

Status Pool::Impl::map_memory() try {
  if (maps_memory) return {};
  const auto provider = client->devices.provider(opened.device);
  if (!provider) return provider.status();
  memory.reserve(**provider);
  std::vector<uint32_t> all(memory.num_segments());
  std::iota(all.begin(), all.end(), 0u);
  Status status = map_segments(std::move(all), false);
  maps_memory = status.ok();
  return status;
} catch (const CudaError& error) {
  return {error.is_out_of_memory() ? ErrorCode::kResourceExhausted : ErrorCode::kUnavailable,
          error.what()};
}

// Kernels of this process on the pool's GPU.
Status Pool::Impl::prepare_calls(bool in_stream) {
  calls = opened.calls.get();
  has_stream = in_stream;
  if (view.key_offsets.empty()) return {};
  auto copied = calls->copy_to_device(
      view.key_offsets.data(), static_cast<int64_t>(view.key_offsets.size() * sizeof(float)));
  if (!copied) return copied.status();
  key_offsets = std::move(*copied);
  return {};
}

Status Pool::Impl::map_blocks(std::span<const protocol::Block> blocks, bool held) {
  if (!maps_memory) return {};
  try {
    return map_segments(memory.missing(blocks), held);
  } catch (const std::runtime_error& error) {
    // A refusal, so that the caller gives the blocks back.
    return {ErrorCode::kResourceExhausted, error.what()};
  }
}

Status Pool::Impl::map_segments(std::vector<uint32_t> wanted, bool must_be_there) {
  if (wanted.empty()) return {};
  const auto provider = client->devices.provider(opened.device);
  if (!provider) return provider.status();
  while (!wanted.empty()) {
    const size_t count = run_length(wanted);
    const uint64_t unmaps = memory.num_unmaps();
    auto answer = client->session->call(
        protocol::OpenSegments{id, group, wanted[0], static_cast<uint32_t>(count)});
    if (!answer) return answer.status();
    const auto* segments = std::get_if<protocol::Segments>(&answer->body);
    const auto absent = segments == nullptr ? 0
                                            : std::count(segments->size_bytes.begin(),
                                                         segments->size_bytes.end(), 0);
    if (segments == nullptr || segments->size_bytes.size() != count ||
        answer->fds.size() != count - static_cast<size_t>(absent))
      return {ErrorCode::kInternal, "the daemon sent " + std::to_string(answer->fds.size()) +
                                        " segments, not " + std::to_string(count)};
    if (absent > 0 && must_be_there)
      return {ErrorCode::kInternal, "segments " + std::to_string(wanted[0]) + " and on, count " +
                                        std::to_string(count) + ": the daemon has no memory for " +
                                        std::to_string(absent) + " that hold blocks of ours"};
    std::vector<uint32_t> again;
    auto fd = answer->fds.begin();
    for (size_t i = 0; i < count; ++i) {
      if (segments->size_bytes[i] == 0) continue;
      const int segment_fd = (fd++)->get();
      if (Status status = (*provider)->check(segment_fd, layout.segment_bytes[wanted[i]]);
          !status.ok())
        return status;
      // One that was asked back while its fd was on the way is asked for again.
      if (!memory.map(wanted[i], segment_fd, unmaps)) again.push_back(wanted[i]);
    }
    again.insert(again.end(), wanted.begin() + static_cast<std::ptrdiff_t>(count), wanted.end());
    wanted = std::move(again);
  }
  return {};
}

Status Pool::Impl::check_mapped(const char* field, std::span<const int32_t> blocks) const {
  const auto mapped = memory.mapped_unless_all();
  if (!mapped) return {};
  for (size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i] >= 0 && blocks[i] < layout.num_ids() && !(*mapped)[memory.segment_of(blocks[i])])
      return not_mapped(field, i, blocks[i], blocks[i]);
  return {};
}

template <typename Slot>
Status Pool::Impl::check_mapped_slots(const char* field, std::span<const Slot> slots) const {
  const auto mapped = memory.mapped_unless_all();
  if (!mapped) return {};
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t block = slots[i] < 0 ? -1 : slots[i] / view.geometry.block_tokens;
    if (block >= 0 && block < layout.num_ids() && !(*mapped)[memory.segment_of(block)])
      return not_mapped(field, i, slots[i], block);
  }
  return {};
}
template Status Pool::Impl::check_mapped_slots(const char*, std::span<const int32_t>) const;
template Status Pool::Impl::check_mapped_slots(const char*, std::span<const int64_t>) const;

// The entries that sequences of these lengths use; the kernels have checked that they are there.
Status Pool::Impl::check_mapped_table(std::span<const int32_t> seq_lens,
                                      std::span<const int32_t> table, int64_t stride,
                                      std::span<const int32_t> first_tokens,
                                      const ContextShard& shard) const {
  const auto mapped = memory.mapped_unless_all();
  if (!mapped) return {};
  const int64_t block_tokens = view.geometry.block_tokens;
  for (size_t sequence = 0; sequence < seq_lens.size(); ++sequence) {
    const int64_t used =
        (local_tokens(shard, seq_lens[sequence]) + block_tokens - 1) / block_tokens;
    const int64_t skipped = first_tokens.empty() ? 0 : first_tokens[sequence] / block_tokens;
    const auto first = static_cast<int64_t>(sequence) * stride;
    for (int64_t i = first + skipped; i < first + used; ++i) {
      const int32_t block = table[static_cast<size_t>(i)];
      if (block >= 0 && block < layout.num_ids() && !(*mapped)[memory.segment_of(block)])
        return not_mapped("block_table", static_cast<size_t>(i), block, block);
    }
  }
  return {};
}

}  // namespace larder
