#include "daemon/pool_store.h"

#include <cstring>

#include "allocator/host_memory.h"
#include "larder/check.h"

namespace larder::daemon {

OwnerTable::OwnerTable(int64_t num_blocks)
    : num_blocks_(num_blocks),
      segment_(create_host_segment("larder-owners", size_bytes(num_blocks))),
      mapping_(SharedMapping::map(segment_.fd.get(), segment_.size_bytes, true)) {}

int64_t OwnerTable::size_bytes(int64_t num_blocks) {
  constexpr int64_t kPageBytes = 4096;
  const int64_t bytes = num_blocks * static_cast<int64_t>(sizeof(uint64_t));
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

void OwnerTable::set(int32_t block, uint64_t word) {
  LARDER_CHECK(block >= 0 && block < num_blocks_, block, num_blocks_);
  auto* words = reinterpret_cast<uint64_t*>(mapping_.data());
  std::atomic_ref(words[block]).store(word, std::memory_order_release);
}

void OwnerTable::set_all(const std::vector<uint64_t>& words) {
  LARDER_CHECK(std::ssize(words) == num_blocks_, words.size(), num_blocks_);
  // Nobody has the table yet.
  std::memcpy(mapping_.data(), words.data(), words.size() * sizeof(uint64_t));
}

StoredPool* PoolStore::find(PoolId pool) {
  const auto found = pools_.find(pool);
  return found == pools_.end() ? nullptr : &found->second;
}

const StoredPool* PoolStore::find(PoolId pool) const {
  const auto found = pools_.find(pool);
  return found == pools_.end() ? nullptr : &found->second;
}

const StoredPool* PoolStore::find(const std::string& tenant, const std::string& name) const {
  for (const auto& [id, pool] : pools_)
    if (pool.name == name && pool.tenant == tenant) return &pool;
  return nullptr;
}

bool PoolStore::uses(const std::string& device) const {
  for (const auto& [id, pool] : pools_)
    if (pool.device == device) return true;
  return false;
}

bool PoolStore::is_on(PoolId pool, const std::string& device) const {
  const StoredPool* stored = find(pool);
  return stored != nullptr && stored->device == device;
}

const Segment* PoolStore::find_segment(SegmentId id) const {
  const auto found = segments_.find(id);
  return found == segments_.end() ? nullptr : &found->second;
}

}  // namespace larder::daemon
