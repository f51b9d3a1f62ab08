// What a CTA holds of a shared prefix: queries as halves, a tile of keys and values as they are
// stored, and as halves. And how these get there.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_ops.cuh"
#include "kernels/cuda/attend_prefix_plan.cuh"
#include "kernels/cuda/attend_rows.cuh"
#include "kernels/cuda/output.cuh"

namespace larder::kernels::cuda::prefix {

inline constexpr int kWarps = 4;
inline constexpr int kWideThreads = 32 * kWarps;
inline constexpr int kRunTokens = 16;  // consecutive in a block: what a warp copies at once
inline constexpr int kSplitTokens = 64;
inline constexpr int kMinSplitTiles = 2;  // of kSplitTokens
inline constexpr float kLog2e = 1.44269504088896341f;

// Halves are held so many powers of two below their value.
__host__ __device__ constexpr int lowered_by(KvFormat format) {
  return format == KvFormat::kNvfp4 ? 14 : 0;
}

// Sizes of a CTA's tiles. A row of halves is cut into chunks of 16 bytes, which lie XORed with the
// row's number mod 8, so that eight rows of one chunk meet all banks. nvfp4 has the even elements
// of a group of 16 in one chunk and the odd ones in the next, in queries, keys and values alike.
template <KvFormat kStored, int kHeadDim>
struct Tiles {
  static constexpr KvFormat kFormat = kStored;
  static constexpr int kDim = kHeadDim;
  static constexpr bool kIsDirect = kFormat == KvFormat::kFp16;  // stored as it is multiplied
  static constexpr bool kHasParity = kFormat == KvFormat::kNvfp4;
  static constexpr int kKeys = kDim == 256 ? 32 : 64;
  static constexpr int kMaxStripes = kDim == 256 ? 1 : 2;  // of 16 pairs, a warp
  static constexpr int kPairs = 16 * kWarps * kMaxStripes;
  static constexpr int kRuns = kKeys / kRunTokens;
  static constexpr int kRowBytes = kFormat == KvFormat::kNvfp4     ? kDim / 2
                                   : kFormat == KvFormat::kFp8E4m3 ? kDim
                                                                   : 2 * kDim;
  static constexpr int kScaleBytes = kFormat == KvFormat::kNvfp4 ? kDim / 16 : 0;
  static constexpr int kRunBytes = kRunTokens * (kRowBytes + kScaleBytes);
  static constexpr int kHalfRowBytes = 2 * kDim;
  static constexpr int kHalvesBytes = 2 * kKeys * kHalfRowBytes;  // K, then V
  static constexpr int kRawBytes = kIsDirect ? 0 : 2 * kRuns * kRunBytes;
  // Offsets in shared memory.
  static constexpr int kQueries = 0;
  static constexpr int kHalves = kPairs * kHalfRowBytes;
  static constexpr int kRaw = kHalves + (kIsDirect ? 2 : 1) * kHalvesBytes;
  static constexpr int kFactors = kRaw + 2 * kRawBytes;   // [kPairs] of float2
  static constexpr int kPresent = kFactors + kPairs * 8;  // [2, 4] of int
  static constexpr int kBytes = kPresent + 32;
};

__host__ __device__ constexpr int chunk_offset(int row, int chunk, int row_bytes) {
  return row * row_bytes + (chunk ^ (row & 7)) * 16;
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
  const float* key_offset = nullptr;  // where soft_cap needs it
  float2* states = nullptr;
  float* sums = nullptr;
  int32_t num_splits = 1;
  int32_t group_size = 1;
  int32_t block_shift = 0;  // log2 of block_tokens
  float scale = 1.0f;
  float logit_scale = 1.0f;
  float soft_cap = 0.0f;
  bool is_rotated = false;
  float rotation_factor = 1.0f;
  PointOfUse use;
};

// Pairs of a group of sequences, a KV head and keys [begin, end) in tiles: what a CTA does at once.
// Pair p of a group is row p / group_size, head p % group_size.
struct WideItem {
  const int32_t* blocks;
  int64_t first_row;   // of the group
  int64_t first_pair;  // of the CTA, in the group
  int32_t num_pairs;
  int32_t kv_head;
  int32_t split;
  int32_t tokens;
  int32_t begin;
  int32_t end;
};

// The id of a block, a step before it is needed.
__device__ inline int32_t block_of(const WideCall& call, const WideItem& item, int32_t token) {
  if (token >= item.tokens) return -1;
  return load_once(item.blocks + (token >> call.block_shift));
}

// A run of K or V to shared memory: raw, or to the rows of halves from `row` on.
template <typename T, bool kIsKey>
__device__ void copy_run(const WideCall& call, const WideItem& item, int64_t block, int32_t offset,
                         bool is_present, uint32_t to, int row, int lane) {
  const PageLayout& page = call.layer.page;
  const uint8_t* from = call.layer.base + block * call.layer.block_stride_bytes;
  const int64_t first = int64_t{item.kv_head} * call.layer.block_tokens + offset;
  const uint8_t* data =
      from + (kIsKey ? page.k_data_offset_bytes : page.v_data_offset_bytes) + first * T::kRowBytes;
  constexpr int kChunks = kRunTokens * T::kRowBytes / 16;
#pragma unroll
  for (int n = 0; n < kChunks / 32; ++n) {
    const int i = n * 32 + lane;
    int at = i * 16;
    if constexpr (T::kIsDirect) {
      constexpr int kRowChunks = T::kRowBytes / 16;
      at = chunk_offset(row + i / kRowChunks, i % kRowChunks, T::kRowBytes);
    }
    copy_16(to + at, data + i * 16, is_present);
  }
  if constexpr (T::kScaleBytes > 0) {
    const uint8_t* scales = from +
                            (kIsKey ? page.k_scale_offset_bytes : page.v_scale_offset_bytes) +
                            first * T::kScaleBytes;
    if (lane < T::kScaleBytes)
      copy_16(to + kRunTokens * T::kRowBytes + lane * 16, scales + lane * 16, is_present);
  }
}

// A warp's run of the tile that begins at `tile`; with tiles of two runs a warp has K or V of one.
template <typename T>
__device__ void copy_tile(const WideCall& call, const WideItem& item, int32_t tile, int32_t named,
                          int stage, Place place, uint8_t* memory) {
  const int warp = place.warp;
  const int run = warp % T::kRuns;
  const int32_t token = tile + run * kRunTokens;
  const bool is_present =
      token < item.tokens && call.use.may_use(named, call.layer.num_blocks, false, named);
  const int64_t block = is_present ? named : 0;
  const int32_t offset = token & (call.layer.block_tokens - 1);
  auto* present = reinterpret_cast<int*>(memory + T::kPresent) + stage * 4;
  if (place.lane == 0) present[run] = is_present ? 1 : 0;
  const uint32_t raw = shared_address(memory + T::kRaw) + stage * T::kRawBytes + run * T::kRunBytes;
  const uint32_t halves = shared_address(memory + T::kHalves) + stage * T::kHalvesBytes;
  const int row = run * kRunTokens;
  if (T::kRuns == kWarps || warp < T::kRuns)
    copy_run<T, true>(call, item, block, offset, is_present, T::kIsDirect ? halves : raw, row,
                      place.lane);
  if (T::kRuns == kWarps || warp >= T::kRuns)
    copy_run<T, false>(call, item, block, offset, is_present,
                       T::kIsDirect ? halves + T::kHalvesBytes / 2 : raw + T::kRawBytes / 2, row,
                       place.lane);
}

// A group of 16 stored elements as two chunks of halves.
template <typename T>
__device__ void decode_group(const uint8_t* data, const uint8_t* scale, uint4& first,
                             uint4& second) {
  if constexpr (T::kFormat == KvFormat::kNvfp4) {
    const uint2 codes = *reinterpret_cast<const uint2*>(data);
    const uint32_t factor = halves_of_e4m3(*scale * 0x0101u);
    const CodeBytes low = code_bytes(codes.x);
    const CodeBytes high = code_bytes(codes.y);
    const auto lower = [&](uint32_t bytes) {
      return multiply_halves(__byte_perm(bytes, 0, 0x1404), factor);
    };
    const auto upper = [&](uint32_t bytes) {
      return multiply_halves(__byte_perm(bytes, 0, 0x3424), factor);
    };
    first = {lower(low.even), upper(low.even), lower(high.even), upper(high.even)};
    second = {lower(low.odd), upper(low.odd), lower(high.odd), upper(high.odd)};
  } else {
    const uint4 codes = *reinterpret_cast<const uint4*>(data);
    first = {halves_of_e4m3(codes.x & 0xFFFFu), halves_of_e4m3(codes.x >> 16),
             halves_of_e4m3(codes.y & 0xFFFFu), halves_of_e4m3(codes.y >> 16)};
    second = {halves_of_e4m3(codes.z & 0xFFFFu), halves_of_e4m3(codes.z >> 16),
              halves_of_e4m3(codes.w & 0xFFFFu), halves_of_e4m3(codes.w >> 16)};
  }
}

// A run of K or V in shared memory. Eight lanes take four groups of two tokens, so that they write
// to all banks.
template <typename T>
__device__ void decode_run(const uint8_t* raw, uint8_t* halves, int first_row, int lane) {
  const uint8_t* raw_scales = raw + kRunTokens * T::kRowBytes;
  constexpr int kQuads = T::kDim / 64;  // of groups, a token
  constexpr int kTokens = 8 / kQuads;   // that a warp takes at once
  const int group = lane / 8 % kQuads * 4 + lane % 4;
  const int token = lane / 8 / kQuads * 2 + lane / 4 % 2;
  raw += token * T::kRowBytes + group * (T::kRowBytes * 16 / T::kDim);
  const uint8_t* scale = raw_scales + token * T::kScaleBytes + group;
  halves += (first_row + token) * T::kHalfRowBytes;
  // Its XOR with the row's number mod 8, of which `token` has the bits below those of kTokens * n.
  const int chunk = 2 * group ^ token;
#pragma unroll
  for (int n = 0; n < kRunTokens / kTokens; ++n) {
    uint4 first;
    uint4 second;
    decode_group<T>(raw + n * kTokens * T::kRowBytes, scale + n * kTokens * T::kScaleBytes, first,
                    second);
    uint8_t* row = halves + n * kTokens * T::kHalfRowBytes;
    const int place = chunk ^ (kTokens * n & 7);
    *reinterpret_cast<uint4*>(row + place * 16) = first;
    *reinterpret_cast<uint4*>(row + (place ^ 1) * 16) = second;
  }
}

template <typename T>
__device__ void decode_tile(int stage, Place place, uint8_t* memory) {
  const int warp = place.warp;
  const int run = warp % T::kRuns;
  const uint8_t* raw = memory + T::kRaw + stage * T::kRawBytes + run * T::kRunBytes;
  uint8_t* halves = memory + T::kHalves;
  if (T::kRuns == kWarps || warp < T::kRuns)
    decode_run<T>(raw, halves, run * kRunTokens, place.lane);
  if (T::kRuns == kWarps || warp >= T::kRuns)
    decode_run<T>(raw + T::kRawBytes / 2, halves + T::kHalvesBytes / 2, run * kRunTokens,
                  place.lane);
}

// The query side: 16 elements of a pair in a lane's registers, the others in lanes beside it.
template <typename T>
__device__ void rotate_pair(float (&values)[16], float factor) {
#pragma unroll
  for (int h = 1; h < 16; h *= 2)
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if ((i & h) != 0) continue;
      const float a = values[i];
      const float b = values[i + h];
      values[i] = a + b;
      values[i + h] = a - b;
    }
  for (int h = 1; h < T::kDim / 16; h *= 2)
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float other = __shfl_xor_sync(~0u, values[i], h);
      values[i] =
          (threadIdx.x & static_cast<unsigned>(h)) == 0 ? values[i] + other : other - values[i];
    }
#pragma unroll
  for (int i = 0; i < 16; ++i) values[i] *= factor;
}

// What makes a logit of a product: x * product, or with a soft cap what cap_logit takes.
__device__ inline float2 logit_factors(const WideCall& call, float unscaled, float shift) {
  if (call.soft_cap <= 0.0f) return {unscaled * kLog2e, 0.0f};
  const float to_exponent = 2.0f * kLog2e / call.soft_cap;
  return {unscaled * to_exponent, shift * to_exponent};
}

// Scaled by a power of two that brings the pair's greatest magnitude to [2^13, 2^14), which loses
// nothing of bf16 and fp16, and by the sign of the logits' scale.
template <typename T>
__device__ void store_pair(const WideCall& call, float (&values)[16], float shift, int pair,
                           int part, uint8_t* memory) {
  float greatest = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) greatest = fmaxf(greatest, fabsf(values[i]));
  for (int h = 1; h < T::kDim / 16; h *= 2)
    greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, h));
  const uint32_t exponent = max(__float_as_uint(greatest) >> 23, 20u);
  const float sign = call.logit_scale < 0.0f ? -1.0f : 1.0f;
  const float up = sign * __uint_as_float((127u + 13u + 127u - exponent) << 23);
  const float down = __uint_as_float((exponent - 13u) << 23);
#pragma unroll
  for (float& value : values) value *= up;
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    words[i] = T::kHasParity ? pack_halves(values[i % 4 * 4 + i / 4], values[i % 4 * 4 + i / 4 + 2])
                             : pack_halves(values[2 * i], values[2 * i + 1]);
  uint8_t* queries = memory + T::kQueries;
  *reinterpret_cast<uint4*>(queries + chunk_offset(pair, 2 * part, T::kHalfRowBytes)) = {
      words[0], words[1], words[2], words[3]};
  *reinterpret_cast<uint4*>(queries + chunk_offset(pair, 2 * part + 1, T::kHalfRowBytes)) = {
      words[4], words[5], words[6], words[7]};
  constexpr float kRaise = 1 << lowered_by(T::kFormat);
  if (part == 0)
    reinterpret_cast<float2*>(memory + T::kFactors)[pair] =
        logit_factors(call, fabsf(call.logit_scale) * kRaise * down, shift);
}

// Queries of the item's pairs as halves, zeros up to a multiple of 64 pairs, and their factors.
template <typename T>
__device__ void load_queries(const WideCall& call, const WideItem& item, uint8_t* memory) {
  constexpr int kLanes = T::kDim / 16;  // a pair
  constexpr int kStep = kWideThreads / kLanes;
  constexpr int kBatch = 4;  // loads in flight, a thread: two each
  const int part = static_cast<int>(threadIdx.x) % kLanes;
  const int limit = (item.num_pairs + 63) / 64 * 64;
  for (int first = static_cast<int>(threadIdx.x) / kLanes; first < limit; first += kBatch * kStep) {
    uint4 loaded[kBatch][2] = {};
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int pair = first + n * kStep;
      if (pair >= item.num_pairs) continue;
      const auto at = static_cast<uint32_t>(item.first_pair + pair);
      const auto size = static_cast<uint32_t>(call.group_size);
      const int64_t row = item.first_row + at / size;
      const int64_t head = int64_t{item.kv_head} * call.group_size + at % size;
      const auto* q = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(call.q.data) +
                                                     call.q.row_index(row, head) + part * 16);
      loaded[n][0] = q[0];
      loaded[n][1] = q[1];
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int pair = first + n * kStep;
      const bool is_bf16 = call.q.dtype == Dtype::kBf16;
      const uint32_t words[8] = {loaded[n][0].x, loaded[n][0].y, loaded[n][0].z, loaded[n][0].w,
                                 loaded[n][1].x, loaded[n][1].y, loaded[n][1].z, loaded[n][1].w};
      float values[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const auto bits = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
        values[i] = is_bf16 ? bf16_value(bits) : __half2float(__ushort_as_half(bits));
      }
      float shift = 0.0f;
      if (call.key_offset != nullptr) {
        const float* offset = call.key_offset + int64_t{item.kv_head} * T::kDim + part * 16;
        double product = 0.0;
#pragma unroll
        for (int i = 0; i < 16; ++i) product += double{values[i]} * offset[i];
        for (int h = 1; h < kLanes; h *= 2) product += __shfl_xor_sync(~0u, product, h);
        shift = static_cast<float>(call.scale * product);
      }
      if (call.is_rotated) rotate_pair<T>(values, call.rotation_factor);
      store_pair<T>(call, values, shift, pair, part, memory);
    }
  }
}

}  // namespace larder::kernels::cuda::prefix
