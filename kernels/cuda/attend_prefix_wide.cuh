// Attention of many query pairs over the keys of a shared prefix: softmax over tiles of keys
// between two products of matrices, in the manner of FlashAttention 3. One group of a CTA's warps
// loads and decodes, the others have 64 pairs each.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_load.cuh"
#include "kernels/cuda/attend_prefix_products.cuh"
#include "kernels/cuda/attend_prefix_queries.cuh"
#include "kernels/cuda/attend_prefix_softmax.cuh"
#include "kernels/cuda/early_launch.cuh"

namespace larder::kernels::cuda::prefix {

// Of 168 that a thread begins with, where loaders leave some to two groups of pairs.
inline constexpr int kLoaderRegisters = 72;
inline constexpr int kPairRegisters = 216;
static_assert(kLoaderRegisters + 2 * kPairRegisters <= 3 * 168);

// Of the CTA's pairs.
__device__ inline int pair_of(Place place, int half) {
  return (place.group - 1) * kGroupPairs + place.warp * 16 + half * 8 + place.lane / 4;
}

// Where a pair's state of a split lies, in states.
__device__ inline int64_t state_index(const WideCall& call, const WideItem& item, int pair) {
  const auto at = static_cast<uint32_t>(item.first_pair + pair);
  const auto size = static_cast<uint32_t>(call.group_size);
  const int64_t row = item.first_row + at / size;
  const int64_t head = int64_t{kv_head_of_cta()} * call.group_size + at % size;
  return (split_of_cta() * call.q.shape[0] + row) * call.q.shape[1] + head;
}

// Of a pair that sees no key of the split.
template <typename T>
__device__ __noinline__ void store_nothing(const WideCall& call, const WideItem& item, int pair) {
  const int64_t index = state_index(call, item, pair);
  call.states[index] = {kNoBase, 0.0f};
  auto* sums = reinterpret_cast<float4*>(call.sums + index * T::kDim);
  for (int four = 0; four < T::kDim / 4; ++four) sums[four] = {0.0f, 0.0f, 0.0f, 0.0f};
}

template <typename T>
__device__ inline void store_sums(const WideCall& call, const WideItem& item, Place place,
                                  const float (&shifts)[2], const WarpSums<T>& warp_sums) {
  const int column = place.lane % 4;
  constexpr float kToWeight = 1.0f / (1 << static_cast<int>(kRaise));
  constexpr float kToValue = kToWeight * (1 << lowered_by(T::kFormat));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float weight = warp_sums.weights[half];
    weight += __shfl_xor_sync(~0u, weight, 1);
    weight += __shfl_xor_sync(~0u, weight, 2);
    const int pair = pair_of(place, half);
    if (pair >= item.num_pairs) continue;
    if (weight == 0.0f) {
      if (column == 0) store_nothing<T>(call, item, pair);
      continue;
    }
    const int64_t index = state_index(call, item, pair);
    if (column == 0) call.states[index] = {warp_sums.base[half] + shifts[half], weight * kToWeight};
    float* to = call.sums + index * T::kDim;
#pragma unroll
    for (int n = 0; n < T::kDim / 16; ++n) {
      const float* low = warp_sums.sums[n / 4][2 * (n % 4)] + 2 * half;
      const float* high = warp_sums.sums[n / 4][2 * (n % 4) + 1] + 2 * half;
      if constexpr (T::kHasParity) {
        *reinterpret_cast<float4*>(to + n * 16 + column * 4) = {
            low[0] * kToValue, high[0] * kToValue, low[1] * kToValue, high[1] * kToValue};
      } else {
        *reinterpret_cast<float2*>(to + n * 16 + column * 2) = {low[0] * kToValue,
                                                                low[1] * kToValue};
        *reinterpret_cast<float2*>(to + n * 16 + 8 + column * 2) = {high[0] * kToValue,
                                                                    high[1] * kToValue};
      }
    }
  }
}

// The keys of an item for a group's pairs, tile by tile. With wgmma, and registers enough, three
// things are under way at once: the products of the next tile's keys, the weights of this one, and
// the sums of the last one's values.
template <typename T>
class PairWork {
 public:
  __device__ PairWork(const WideCall& call, int num_tiles, Place place, uint8_t* memory)
      : call_(call),
        memory_(memory),
        num_tiles_(num_tiles),
        place_(place),
        pair_group_(__shfl_sync(~0u, place.group - 1, 0)) {
    const auto* factors = reinterpret_cast<const float2*>(memory + T::factors(call.num_stages));
#pragma unroll
    for (int half = 0; half < 2; ++half) factors_[half] = factors[pair_of(place, half)];
  }

  __device__ void attend(WarpSums<T>& warp_sums) {
    Sums products;
    Weights weights = {};
    if constexpr (kIsAhead) {
      wait_until_filled();
      begin_keys(products);
      wait_for_products<0>();
      settle(products);
    }
#pragma unroll 1
    while (tile_ < num_tiles_) {
      if constexpr (kIsAhead)
        take_tile_ahead(products, weights, warp_sums);
      else
        take_tile(products, weights, warp_sums);
    }
    if constexpr (kIsAhead) {
      begin_values(stage_before_, weights, num_tiles_ > 1, warp_sums);
      wait_for_products<0>();
      settle_all(warp_sums);
    }
  }

 private:
  // Holds three stages at once, and the loaders of stored halves begin a further one before they
  // say that the third is there. Devices with wgmma have 227 KiB, so find_stages finds as many.
  static constexpr bool kIsAhead = kHasGroupProducts && T::kDim <= 128;
  static constexpr int kStagesAhead = T::kIsDirect ? 4 : 3;
  static_assert(!kIsAhead || (kStagesAhead <= kMaxStages && T::bytes(kStagesAhead) <= 227 * 1024));

  static __device__ void settle_all(WarpSums<T>& warp_sums) {
#pragma unroll
    for (auto& panel : warp_sums.sums) settle(panel);
  }
  __device__ uint32_t keys(int stage) const { return shared_address(memory_) + T::stage(stage); }
  __device__ void wait_until_filled() const {
    arrive_and_wait(filled_barrier(stage_, pair_group_), 2 * kGroupThreads);
    make_visible_to_products();
  }
  // Loaders do not wait for the last ones.
  __device__ void leave(int stage, int tile) const {
    if (tile + call_.num_stages < num_tiles_) arrive(read_barrier(stage), T::kThreads);
  }
  __device__ void go_on() {
    stage_before_ = stage_;
    stage_ = stage_ + 1 == call_.num_stages ? 0 : stage_ + 1;
    ++tile_;
  }

  __device__ void begin_keys(Sums& products) const {
    const uint32_t queries =
        shared_address(memory_) + T::kQueries + pair_group_ * T::kHalfTileBytes;
    begin_products_of_keys<T>(queries, keys(stage_), place_, products);
  }
  __device__ void begin_values(int stage, const Weights& weights, bool adds,
                               WarpSums<T>& warp_sums) const {
    begin_sums_of_values<T>(weights, keys(stage) + T::kHalfTileBytes, adds, place_, warp_sums.sums);
  }

  // `products`: the tile's; then those of the one after it. `weights`: of the one before; then the
  // tile's. Before the first tile and after the last one products are made of what is there, and
  // not used: without branches around them they stay in flight.
  __device__ void take_tile_ahead(Sums& products, Weights& weights, WarpSums<T>& warp_sums) {
    Sums exponents;
    Sums values;
    make_exponents<T>(call_, factors_, memory_, stage_, warp_sums, products, exponents);
    const int before = stage_before_;
    begin_values(before, weights, tile_ > 1, warp_sums);
    go_on();
    if (tile_ < num_tiles_) wait_until_filled();
    begin_keys(products);
    weigh(exponents, values);
    wait_for_products<1>();
    settle_all(warp_sums);
    if (tile_ > 1) leave(before, tile_ - 2);
    settle_weights(exponents, values, weights, warp_sums);
    wait_for_products<0>();
    settle(products);
  }

  // One thing after the other.
  __device__ void take_tile(Sums& products, Weights& weights, WarpSums<T>& warp_sums) {
    wait_until_filled();
    begin_keys(products);
    wait_for_products<0>();
    settle(products);
    Sums exponents;
    Sums values;
    make_exponents<T>(call_, factors_, memory_, stage_, warp_sums, products, exponents);
    weigh(exponents, values);
    settle_weights(exponents, values, weights, warp_sums);
    begin_values(stage_, weights, true, warp_sums);
    wait_for_products<0>();
    settle_all(warp_sums);
    leave(stage_, tile_);
    go_on();
  }

  const WideCall& call_;
  uint8_t* memory_;
  const int num_tiles_;
  const Place place_;
  const int pair_group_;  // the warp's: one register for all lanes, as products want addresses
  float2 factors_[2];
  int tile_ = 0;
  int stage_ = 0;  // of the tile
  int stage_before_ = 0;
};

template <typename T>
__device__ inline void attend_pairs(const WideCall& call, const WideItem& item, uint8_t* memory) {
  const Place place = current_place();
  const int pair_group = place.group - 1;
  load_queries<T>(call, item, pair_group, memory);
  make_visible_to_products();
  arrive_and_wait(group_barrier(pair_group), kGroupThreads);
  WarpSums<T> warp_sums;
  PairWork<T>(call, item.num_tiles(), place, memory).attend(warp_sums);
  // With a cap the logits have them already.
  float shifts[2] = {0.0f, 0.0f};
  if (call.soft_cap <= 0.0f) {
    const auto* factors = reinterpret_cast<const float2*>(memory + T::factors(call.num_stages));
#pragma unroll
    for (int half = 0; half < 2; ++half) shifts[half] = factors[pair_of(place, half)].y;
  }
  store_sums<T>(call, item, place, shifts, warp_sums);
}

// The group that a tile of pairs is of, by a search of all lanes at once.
__device__ inline PrefixGroup find_group(const WideCall& call, int64_t tile) {
  const int32_t num_groups = call.header->num_groups;
  int32_t before = 0;
  for (int32_t first = 0; first < num_groups; first += 32) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x) % 32;
    const bool begins = i < num_groups && call.groups[i].first_tile <= tile;
    before += __popc(__ballot_sync(~0u, static_cast<int>(begins)));
  }
  return call.groups[before - 1];
}

// There are below 2^30 pairs.
template <typename T>
__device__ inline WideItem item_of(const WideCall& call, const PrefixGroup& group, int64_t tile) {
  WideItem item;
  item.blocks = call.block_table + group.leader * call.block_table_stride;
  item.first_row = static_cast<int32_t>(group.first_row);
  item.first_pair = static_cast<int32_t>(tile - group.first_tile) * T::kPairs;
  item.num_pairs =
      min(static_cast<int32_t>(group.num_rows) * call.group_size - item.first_pair, T::kPairs);
  item.tokens = group.tokens;
  const auto tiles = static_cast<uint32_t>(group.tokens - 1) / kKeys + 1;
  const uint32_t length = max((tiles + gridDim.y - 1) / gridDim.y, kMinSplitTiles) * kKeys;
  const auto tokens = static_cast<uint64_t>(group.tokens);
  item.begin = static_cast<int32_t>(min(uint64_t{length} * blockIdx.y, tokens));
  item.end = static_cast<int32_t>(min(uint64_t{length} * (blockIdx.y + 1), tokens));
  return item;
}

// All items of the CTA, by one of its groups: each does its own part of them.
template <typename T, typename Part>
__device__ inline void take_items(const WideCall& call, const PlanHeader& header,
                                  const PrefixGroup& only_group, const Part& part) {
  const int64_t num_tiles = header.num_tiles;
  PrefixGroup group = only_group;
  bool is_known = header.num_groups == 1;
#pragma unroll 1
  for (int64_t tile = blockIdx.z; tile < num_tiles; tile += gridDim.z) {
    if (!is_known) group = find_group(call, tile);
    const WideItem item = item_of<T>(call, group, tile);
    is_known = false;
    part(item);
    if (tile + gridDim.z < num_tiles)
      arrive_and_wait(0, T::kThreads);  // before the next item takes the shared memory
  }
}

// Past the L1, which may hold what was there before.
template <typename Words>
__device__ inline Words load_near(const Words* from) {
  constexpr int kCount = sizeof(Words) / 8;
  static_assert(sizeof(Words) % 8 == 0);
  unsigned long long words[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    words[i] = __ldcg(reinterpret_cast<const unsigned long long*>(from) + i);
  Words value;
  memcpy(&value, words, sizeof value);
  return value;
}

// Queries and block ids, a line by each thread of the grid. Nothing is read: the kernel before may
// still run.
__device__ inline void bring_near(const WideCall& call) {
  const uint32_t cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t at = int64_t{cta * blockDim.x + threadIdx.x} * kLineBytes;
  const auto prefetch = [&](const void* memory, int64_t bytes) {
    if (at < bytes) prefetch_line(static_cast<const uint8_t*>(memory) + at);
  };
  prefetch(call.q.data, call.query_bytes);
  prefetch(call.block_table, call.table_bytes);
}

// Grid: KV heads, splits of the keys, and tiles of query pairs in strides. CTA: a group of loading
// warps, and one for each 64 pairs. Per token and KV head the stored bytes are read and decoded
// once a tile of 128 pairs (64 of 256 dims). Bound by dependent instructions: of 128 dims, a tile
// of 64 keys and 128 pairs takes wgmma 1,024 clocks, and all of it twice as many.
template <typename T>
__global__ __launch_bounds__(T::kThreads,
                             1) void attend_wide(const __grid_constant__ WideCall call) {
  extern __shared__ uint4 shared_memory[];
  uint8_t* memory = reinterpret_cast<uint8_t*>(shared_memory);
  memory += (kMemoryAlignment - shared_address(memory) % kMemoryAlignment) % kMemoryAlignment;
  // A plan that is taken was there before the kernel that made it let any start that takes it, and
  // so were block tables: queries, keys and values are waited for where they are asked for.
  if (call.taken.shared_key == nullptr) {
    bring_near(call);
    wait_for_previous_kernel();
  }
  // All that is looked at first, at once; other groups once the key has been seen.
  const PlanHeader header = load_near(call.header);
  const PrefixGroup group = load_near(call.groups);
  const bool is_there = call.taken.is_there();
  asm volatile("" ::"l"(header.num_tiles), "r"(header.num_groups), "r"(group.tokens));
  if (!is_there || blockIdx.z >= header.num_tiles) {
    wait_for_previous_kernel();
    return;
  }
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < kGroupThreads) {
    if constexpr (T::kGroups == 2) keep_registers<kLoaderRegisters>();
    take_items<T>(call, header, group, [&](const WideItem& item) {
      if (item.begin < item.end) RunLoader<T>(call, item, memory).load();
    });
  } else {
    if constexpr (T::kGroups == 2) add_registers<kPairRegisters>();
    take_items<T>(call, header, group, [&](const WideItem& item) {
      const int pair = thread - kGroupThreads;
      if (item.begin < item.end) {
        attend_pairs<T>(call, item, memory);
      } else if (pair < item.num_pairs) {
        wait_for_previous_kernel();
        store_nothing<T>(call, item, pair);
      }
    });
  }
}

}  // namespace larder::kernels::cuda::prefix
