// A plan that calls share. It follows from lengths, shapes and prefixes alone, which are the same
// for all layers of a step: the first one keeps what its CTAs and warps take, and the others begin
// with that. What is kept is safe whatever the lengths are by then: blocks of the table's rows,
// rows of q.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attend_decode_ends.cuh"

namespace larder::kernels::cuda {

// In the plan's memory: the key; then, for each CTA, its end and the places of its warps up to
// their columns, which follow from a layer's queries; then, of calls with a prefix that is used,
// what attend_prefix keeps (SharedPlan::prefix_at).
inline constexpr int kKeptKeyBytes = 16;
inline constexpr int kKeptPlaceBytes = offsetof(WarpPlaces, columns);
inline constexpr int kKeptPlaceLanes = kKeptPlaceBytes / 16;
inline constexpr int kKeptEndLanes = sizeof(MergeJob) / 16;
static_assert(kKeptPlaceBytes % 16 == 0 && kKeptPlaceLanes + kKeptEndLanes <= 32);

__host__ __device__ constexpr int64_t kept_bytes(int64_t num_ctas, int64_t warps) {
  return kKeptKeyBytes + num_ctas * (int64_t{sizeof(MergeJob)} + warps * kKeptPlaceBytes);
}

// The lane's 16 bytes of what the warp keeps: of its places or, by warp 0, of the CTA's end.
struct KeptWord {
  uint4* here;  // nullptr: none
  uint4* kept;

  __device__ KeptWord(const DecodeCall& call, WarpPlaces& places, MergeJob& end) {
    const int lane = thread_index() % 32;
    const int warp = thread_index() / 32;
    uint8_t* memory = call.shared.memory + kept_bytes(blockIdx.x, blockDim.x / 32);
    const bool is_end = warp == 0 && lane >= kKeptPlaceLanes;
    here = is_end ? reinterpret_cast<uint4*>(&end) + (lane - kKeptPlaceLanes)
                  : reinterpret_cast<uint4*>(&places) + lane;
    if (lane >= (warp == 0 ? kKeptPlaceLanes + kKeptEndLanes : kKeptPlaceLanes)) here = nullptr;
    const int at = warp * kKeptPlaceBytes + 16 * lane;
    kept = reinterpret_cast<uint4*>(memory) +
           (is_end ? lane - kKeptPlaceLanes : kKeptEndLanes + at / 16);
  }
};

// Begins with a plan that was kept; false: there is none for calls like this one. By all warps.
__device__ inline bool take_plan(const DecodeCall& call, WarpPlaces& places, MergeJob& end) {
  const KeptWord word(call, places, end);
  uint4 bytes = {};
  if (word.here != nullptr) bytes = __ldcg(word.kept);
  const uint64_t key = load_and_rely(reinterpret_cast<const uint64_t*>(call.shared.memory));
  if (key != call.shared.key) return false;
  if (word.here != nullptr) *word.here = bytes;
  __syncwarp();
  if (thread_index() % 32 == 0) places.loads.aim(call);
  __syncwarp();
  return true;
}

// Keeps what the warp begins with; warp 0 the CTA's end too.
__device__ __noinline__ inline void keep_plan(const DecodeCall& call, WarpPlaces& places,
                                              MergeJob& end) {
  __syncwarp();
  const KeptWord word(call, places, end);
  if (word.here != nullptr) *word.kept = *word.here;
  // Before other CTAs have kept theirs, maybe: whoever looks at the key begins after all of them.
  if (blockIdx.x == 0 && thread_index() == 0)
    *reinterpret_cast<uint64_t*>(call.shared.memory) = call.shared.key;
  // Takers may start before this kernel has ended.
  __threadfence();
  __syncwarp();  // places are the warp's to change from here on
}
// Of a CTA without work.
__device__ __noinline__ inline void keep_nothing(const DecodeCall& call, WarpPlaces& places,
                                                 MergeJob& end) {
  if (thread_index() % 32 == 0) places.left = 0;
  if (thread_index() == 0) end = {};
  keep_plan(call, places, end);
}

}  // namespace larder::kernels::cuda
