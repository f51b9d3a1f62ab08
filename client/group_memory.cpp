#include "client/group_memory.h"

#include <algorithm>
#include <string>
#include <unistd.h>

namespace larder {

Status check_layout(const protocol::GroupLayout& layout) {
  const auto wrong = [](const std::string& what) {
    return Status(ErrorCode::kInternal, "the daemon answered with a layout of " + what);
  };
  const int64_t page_bytes = ::sysconf(_SC_PAGESIZE);
  int64_t sum = 0;
  for (const int64_t bytes : layout.segment_bytes)
    if (bytes <= 0 || bytes % page_bytes != 0 || __builtin_add_overflow(sum, bytes, &sum))
      return wrong("a segment of " + std::to_string(bytes) + " bytes");
  int64_t needed = 0;
  if (layout.num_ids() <= 0 || layout.block_stride_bytes <= 0 ||
      __builtin_mul_overflow(layout.num_ids(), layout.block_stride_bytes, &needed) || needed > sum)
    return wrong(std::to_string(layout.num_ids()) + " blocks of " +
                 std::to_string(layout.block_stride_bytes) + " bytes in segments of " +
                 std::to_string(sum) + " bytes together");
  return {};
}

GroupMemory::GroupMemory(const protocol::GroupLayout& layout)
    : layout_(layout), offsets_({0}), mapped_(layout.segment_bytes.size(), false) {
  for (const int64_t bytes : layout.segment_bytes) offsets_.push_back(offsets_.back() + bytes);
}

void GroupMemory::reserve(const MemoryProvider& provider) {
  if (range_ == nullptr) range_ = provider.reserve(offsets_.back());
}

uint32_t GroupMemory::segment_of(int64_t block) const {
  const auto after =
      std::upper_bound(offsets_.begin(), offsets_.end(), block * layout_.block_stride_bytes);
  return static_cast<uint32_t>(after - offsets_.begin() - 1);
}

std::vector<uint32_t> GroupMemory::missing(std::span<const protocol::Block> blocks) const {
  const auto mapped = mapped_unless_all();
  if (!mapped) return {};
  std::set<uint32_t> segments;
  for (const protocol::Block& block : blocks)
    if (block.id >= 0 && block.id < layout_.num_ids()) segments.insert(segment_of(block.id));
  std::vector<uint32_t> result;
  for (const uint32_t segment : segments)
    if (!(*mapped)[segment]) result.push_back(segment);
  return result;
}

std::optional<std::vector<bool>> GroupMemory::mapped_unless_all() const {
  const std::lock_guard lock(mutex_);
  if (num_mapped_ == mapped_.size()) return std::nullopt;
  return mapped_;
}

uint64_t GroupMemory::num_unmaps() const {
  const std::lock_guard lock(mutex_);
  return num_unmaps_;
}

bool GroupMemory::map(uint32_t segment, int fd, uint64_t unmaps) {
  const std::lock_guard lock(mutex_);
  if (num_unmaps_ != unmaps) return false;
  range_->map_at(offsets_[segment], fd, layout_.segment_bytes[segment]);
  if (!mapped_[segment]) ++num_mapped_;
  mapped_[segment] = true;
  return true;
}

void GroupMemory::unmap(uint32_t segment) {
  if (segment >= num_segments()) return;
  const std::lock_guard lock(mutex_);
  ++num_unmaps_;
  if (!mapped_[segment]) return;
  range_->unmap_at(offsets_[segment], layout_.segment_bytes[segment]);
  mapped_[segment] = false;
  --num_mapped_;
}

void GroupMemories::add(uint64_t pool, uint32_t group, GroupMemory* memory) {
  const std::lock_guard lock(mutex_);
  memories_[{pool, group}].insert(memory);
}

void GroupMemories::remove(uint64_t pool, uint32_t group, GroupMemory* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = memories_.find({pool, group});
  if (found == memories_.end()) return;
  found->second.erase(memory);
  if (found->second.empty()) memories_.erase(found);
}

void GroupMemories::unmap(uint64_t pool, uint32_t group, uint32_t segment) {
  const std::lock_guard lock(mutex_);
  const auto found = memories_.find({pool, group});
  if (found == memories_.end()) return;
  for (GroupMemory* memory : found->second) memory->unmap(segment);
}

}  // namespace larder
