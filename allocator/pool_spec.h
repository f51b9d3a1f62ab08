// What a pool may be, and whether two descriptions of a pool agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "allocator/block_key.h"
#include "allocator/extent.h"
#include "larder/status.h"

namespace larder {

// What of a prefix a group must still have for the prefix to be of use.
enum class GroupKind : uint8_t {
  kFull = 0,    // every block: attention over everything
  kWindow = 1,  // the blocks of the last window_tokens tokens
  kState = 2,   // one block, the state at the end: recurrent layers
};

struct GroupSpec {
  std::string name;
  int64_t block_bytes = 0;  // all layers of one block, unpadded
  int64_t num_blocks = 0;
  int32_t block_tokens = 0;
  bool one_segment = false;         // layout needs one piece of memory (LBHNC)
  bool reserve_block_zero = false;  // block 0 is a null block that is never handed out
  int64_t max_blocks = 0;           // 0: num_blocks, the group has a fixed size
  int64_t segment_bytes = 0;        // of an extent; 0: chosen
  GroupKind kind = GroupKind::kFull;
  int32_t window_tokens = 0;  // of a window group
  bool operator==(const GroupSpec&) const = default;
};

struct PoolSpec {
  std::string name;   // unique within the tenant
  std::string model;  // model and revision, as the engine states it
  Identity identity;  // everything else that must agree between sessions that share the pool
  std::vector<GroupSpec> groups;
};

inline constexpr size_t kMaxPoolNameBytes = 128;
inline constexpr size_t kMaxGroupsPerPool = 16;
inline constexpr int64_t kMaxUnitBlocks = 1024;

// INVALID_ARGUMENT or UNSUPPORTED, naming the field. Sizes are checked by lay_out_group.
Status check_pool_spec(const PoolSpec& spec);

// Tokens of one publish unit: the least common multiple of the groups' block_tokens.
int64_t unit_tokens(const std::vector<GroupSpec>& groups);
// How many blocks of this group make a unit; one where a block is a state.
int32_t blocks_in_unit(const std::vector<GroupSpec>& groups, const GroupSpec& group);

Result<GroupLayout> lay_out_group(const GroupSpec& spec);

// INVALID_ARGUMENT naming the first field, in the order of the structs, in which a request differs
// from the pool that bears the name, with both values.
Status check_same_spec(const PoolSpec& pool, const PoolSpec& request);

}  // namespace larder
