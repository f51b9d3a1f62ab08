// What a CTA holds of a shared prefix: queries as halves, tiles of keys and values as they are
// stored, and as halves. And what it is told.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_ops.cuh"
#include "kernels/cuda/attend_prefix_plan.cuh"
#include "kernels/cuda/attend_rows.cuh"
#include "kernels/cuda/output.cuh"

namespace larder::kernels::cuda::prefix {

inline constexpr int kGroupThreads = 128;  // of a warpgroup: the loaders, or 64 pairs
inline constexpr int kGroupPairs = 64;
inline constexpr int kRunTokens = 16;  // consecutive in a block: what a warp copies at once
inline constexpr int kKeys = 64;       // of a tile, a run for each loading warp
inline constexpr int kRuns = kKeys / kRunTokens;
inline constexpr int kMinSplitTiles = 2;
inline constexpr int kMaxStages = 4;
inline constexpr int kMemoryAlignment = 1024;
inline constexpr int kLineBytes = 128;  // of the L2
inline constexpr float kLog2e = 1.44269504088896341f;

// Halves are held so many powers of two below their value.
__host__ __device__ constexpr int lowered_by(KvFormat format) {
  return format == KvFormat::kNvfp4 ? 14 : 0;
}

// Sizes of a CTA's tiles. Rows of halves are cut into panels of 64 dims, 128 bytes a row: chunks of
// 16 bytes lie XORed with the row's number mod 8, as wgmma wants them, and so that eight rows of
// one chunk meet all banks. nvfp4 has the even elements of a group of 16 in one chunk and the odd
// ones in the next, in queries, keys and values alike.
template <KvFormat kStored, int kHeadDim>
struct Tiles {
  static constexpr KvFormat kFormat = kStored;
  static constexpr int kDim = kHeadDim;
  static constexpr bool kIsDirect = kFormat == KvFormat::kFp16;  // stored as it is multiplied
  static constexpr bool kHasParity = kFormat == KvFormat::kNvfp4;
  static constexpr int kGroups = kDim == 256 ? 1 : 2;  // warpgroups of pairs
  static constexpr int kPairs = kGroupPairs * kGroups;
  static constexpr int kThreads = kGroupThreads * (kGroups + 1);
  static constexpr int kPanels = kDim / 64;
  static constexpr int kRowBytes = kFormat == KvFormat::kNvfp4     ? kDim / 2
                                   : kFormat == KvFormat::kFp8E4m3 ? kDim
                                                                   : 2 * kDim;
  static constexpr int kScaleBytes = kFormat == KvFormat::kNvfp4 ? kDim / 16 : 0;
  static constexpr int kRunBytes = kRunTokens * (kRowBytes + kScaleBytes);
  static constexpr int kHalfTileBytes = kKeys * 2 * kDim;  // of keys or values; of 64 queries
  static constexpr int kRawTileBytes = kIsDirect ? 0 : kRuns * kRunBytes;
  // Copies on their way, and the tile that is decoded: as many as leave room for a stage of halves
  // where a CTA has 99 KiB (of dims up to 128).
  static constexpr int kRawStages = kDim < 256 && kFormat == KvFormat::kNvfp4 ? 3 : 2;
  static constexpr int kMinStages = kIsDirect ? 2 : 1;
  // Offsets in shared memory, from a multiple of 1024 on.
  static constexpr int kQueries = 0;
  static constexpr int kStages = kGroups * kHalfTileBytes;  // of halves: K, then V

  __host__ __device__ static constexpr int stage(int index) {
    return kStages + index * 2 * kHalfTileBytes;
  }
  // Behind the stages: raw tiles, K and V; [kPairs] of float2; [stages, kRuns] of int.
  __host__ __device__ static constexpr int raw(int stages) { return stage(stages); }
  __host__ __device__ static constexpr int factors(int stages) {
    return raw(stages) + kRawStages * 2 * kRawTileBytes;
  }
  __host__ __device__ static constexpr int present(int stages) {
    return factors(stages) + kPairs * 8;
  }
  // With what it takes to begin at a multiple.
  __host__ __device__ static constexpr int bytes(int stages) {
    return present(stages) + kMaxStages * kRuns * 4 + kMemoryAlignment;
  }
};

// Of a chunk of 16 bytes, in panels of `rows` rows.
__device__ constexpr int chunk_offset(int row, int chunk, int rows) {
  return (chunk / 8 * rows + row) * 128 + ((chunk ^ row) & 7) * 16;
}

// By value.
struct WideCall {
  LayerRows layer;
  StridedTensor q;  // [rows, heads, dim], bf16 or fp16; rows are dense and 16-byte aligned
  const PlanHeader* header = nullptr;
  const PrefixGroup* groups = nullptr;
  TakenPlan taken;
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;
  int64_t query_bytes = 0;  // from the first query's to the last one's
  int64_t table_bytes = 0;
  const float* key_offset = nullptr;  // nullptr unless keys are centred
  float2* states = nullptr;
  float* sums = nullptr;
  int32_t num_stages = 1;  // of halves
  int32_t group_size = 1;
  int32_t block_shift = 0;  // log2 of block_tokens
  float scale = 1.0f;
  float logit_scale = 1.0f;
  float soft_cap = 0.0f;
  bool is_rotated = false;
  float rotation_factor = 1.0f;
  PointOfUse use;
};

// Pairs of a group of sequences and a KV head, keys [begin, end) in tiles: what a CTA does at once.
// Pair p of a group is row p / group_size, head p % group_size.
struct WideItem {
  const int32_t* blocks;
  int32_t first_row;   // of the group
  int32_t first_pair;  // of the CTA, in the group
  int32_t num_pairs;
  int32_t tokens;
  int32_t begin;  // a multiple of kKeys
  int32_t end;

  __device__ int num_tiles() const { return (end - begin + kKeys - 1) / kKeys; }
};
// Of a CTA; a grid has a layer of CTAs for each tile of pairs, or some to take in turn.
__device__ inline int32_t kv_head_of_cta() { return static_cast<int32_t>(blockIdx.x); }
__device__ inline int32_t split_of_cta() { return static_cast<int32_t>(blockIdx.y); }

// A thread's part: warpgroup 0 loads, the others have 64 pairs each.
struct Place {
  int group;
  int warp;  // in the group
  int lane;
};
__device__ inline Place current_place() {
  const auto thread = static_cast<unsigned>(threadIdx.x);
  return {static_cast<int>(thread / kGroupThreads), static_cast<int>(thread / 32 % 4),
          static_cast<int>(thread % 32)};
}

// Named barriers: a stage of halves is filled for a group of pairs, or has been read by all of
// them; and the threads of a group have met. 0 is the CTA's.
__device__ inline int filled_barrier(int stage, int pair_group) {
  return 1 + 3 * stage + pair_group;
}
__device__ inline int read_barrier(int stage) { return 3 + 3 * stage; }
__device__ inline int group_barrier(int pair_group) { return 1 + 3 * kMaxStages + pair_group; }

static_assert(Tiles<KvFormat::kNvfp4, 128>::bytes(1) <= 99 * 1024);
static_assert(Tiles<KvFormat::kFp8E4m3, 128>::bytes(1) <= 99 * 1024);
static_assert(Tiles<KvFormat::kFp16, 128>::bytes(2) <= 99 * 1024);

}  // namespace larder::kernels::cuda::prefix
