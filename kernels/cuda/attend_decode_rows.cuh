// Stored rows in shared memory as operands of matrix products: where each lane finds its share of a
// tile, and how its bytes become 16-bit values.
//
// Lane (g, c) = (lane / 4, lane % 4). Keys: rows of the first operand; the lane has dims of tokens
// key_token(g) and the one two further. Values: the transposed tile; the lane has dims of tokens
// 4c .. 4c + 3. Which dims is free, as long as queries and sums agree: chunks of up to 16 bytes lie
// interleaved over lanes, and 16-byte units are swapped about within a tile so that no two lanes of
// a load meet in a bank.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode.cuh"
#include "kernels/cuda/attend_decode_mma.cuh"

namespace larder::kernels::cuda {

__device__ inline int lane_row() { return static_cast<int>(threadIdx.x % 32 / 4); }
__device__ inline int lane_column() { return static_cast<int>(threadIdx.x % 4); }

// Token of the tile that is row `g` of the keys' operand; row g + 8 is two tokens further. So a
// lane's four weights are those of four consecutive tokens.
__device__ inline int key_token(int g) { return 4 * (g >> 1) + (g & 1); }

// Bytes of rows and where they lie; kBytes per row, one of 32, 64, 128, 256, 512.
template <int kBytes>
struct RowPlaces {
  static constexpr int kUnits = kBytes / 16;  // of a row; a tile has kBytes of them
  static constexpr int kKeyChunkBytes = std::min(16, kBytes / 4);
  static constexpr int kKeyChunks = kBytes / 4 / kKeyChunkBytes;
  static constexpr int kValueChunkBytes = std::min(16, kBytes / 8);
  static constexpr int kValueChunks = kBytes / 8 / kValueChunkBytes;

  // Where unit `unit` of a tile of keys, or of values, is put.
  static __device__ constexpr int key_unit(int unit) {
    if constexpr (kBytes == 32) return unit ^ ((unit >> 3 & 1) << 2);
    if constexpr (kBytes == 64) return unit;
    return unit ^ ((unit / kUnits & 1) << 2);
  }
  static __device__ constexpr int value_unit(int unit) {
    return unit ^ ((unit / (4 * kUnits) & 3) << 1);
  }

  // Byte offsets in a tile that a lane keeps: of its two tokens' keys (32, 64: by token; else by
  // the parity of chunks), and of its tokens' values.
  struct Lane {
    int key[2];
    int value[4];
  };
  static __device__ Lane lane(int g, int c) {
    Lane lane;
    for (int i = 0; i < 2; ++i) {
      const int token = key_token(g) + (kBytes <= 64 ? 2 * i : 0);
      const int byte = token * kBytes + c * kKeyChunkBytes + (kBytes <= 64 ? 0 : 64 * i);
      lane.key[i] = key_unit(byte / 16) * 16 + byte % 16;
    }
    for (int x = 0; x < 4; ++x) {
      const int byte = (4 * c + x) * kBytes + g * kValueChunkBytes;
      lane.value[x] = value_unit(byte / 16) * 16 + byte % 16;
    }
    return lane;
  }
  static __device__ int key_at(const Lane& lane, int second, int chunk) {
    if constexpr (kBytes <= 64) return lane.key[second];
    return lane.key[chunk & 1] + second * 2 * kBytes + (chunk >> 1) * 128;
  }
  static __device__ int value_at(const Lane& lane, int x, int chunk) {
    if constexpr (kBytes == 32) return lane.value[x];
    if constexpr (kBytes == 64) return lane.value[x & 1] + (x >> 1) * 2 * kBytes;
    return lane.value[0] + x * kBytes + chunk * 128;
  }
};

// Up to 16 bytes of shared memory as words.
template <int kBytes>
__device__ inline void load_words(const uint8_t* from, uint32_t (&words)[kBytes / 4]) {
  if constexpr (kBytes == 16) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else if constexpr (kBytes == 8) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    words[0] = two.x, words[1] = two.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

// NVFP4. Values are kCodeFactor times what they stand for, exactly: at most six bits.
template <int kDimension>
struct Nvfp4Rows : RowPlaces<kDimension / 2> {
  using Places = RowPlaces<kDimension / 2>;
  static constexpr int kDim = kDimension;
  static constexpr bool kIsBf16 = false;
  static constexpr bool kHasInfinities = false;
  static constexpr int kTileBytes = 8 * kDim;
  static constexpr int kTileScaleBytes = kDim;
  static constexpr int kStepTiles = 512 / kDim;
  static constexpr int kKeyChunkDims = 2 * Places::kKeyChunkBytes;
  static constexpr int kValueChunkDims = 2 * Places::kValueChunkBytes;
  static constexpr float kUndo = LARDER_HAS_E2M1_INSTRUCTIONS ? 1.0f : 0x1p14f;

  // Which of eight dims the pairs of eight_keys hold.
  static __device__ constexpr int pair_dim(int pair, int second) {
    return LARDER_HAS_E2M1_INSTRUCTIONS ? 2 * pair + second
                                        : (pair & 1) * 2 + (pair >> 1) + 4 * second;
  }

  struct Keys {
    uint32_t words[2][Places::kKeyChunkBytes / 4];
    uint32_t scales[2];
  };
  static __device__ void load_keys(const uint8_t* data, const uint8_t* scales,
                                   const typename Places::Lane& lane, int chunk, Keys& keys) {
    const int g = lane_row();
    const int group = (4 * chunk + lane_column()) * kKeyChunkDims / 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_words<Places::kKeyChunkBytes>(data + Places::key_at(lane, i, chunk), keys.words[i]);
      const uint8_t* scale = scales + (key_token(g) + 2 * i) * (kDim / 16) + group;
      keys.scales[i] =
          e4m3_to_halves(kKeyChunkDims == 16 ? *scale : *reinterpret_cast<const uint16_t*>(scale));
    }
  }
  // Dims 8 * kEight ... of the chunk, of one of the two tokens.
  template <int kEight>
  static __device__ void eight_keys(const Keys& keys, int token, uint32_t (&pairs)[4]) {
    expand_codes(keys.words[token][kEight], pairs);
#pragma unroll
    for (uint32_t& pair : pairs) pair = times_half<(kEight >= 2)>(pair, keys.scales[token]);
  }

  struct Values {
    uint32_t words[4][Places::kValueChunkBytes / 4];
    uint32_t scales[4];  // bytes; of 32 dims two
  };
  static __device__ void load_values(const uint8_t* data, const uint8_t* scales,
                                     const typename Places::Lane& lane, int chunk, Values& values) {
    const int group = lane_row() * kValueChunkDims / 16;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      load_words<Places::kValueChunkBytes>(data + Places::value_at(lane, x, chunk),
                                           values.words[x]);
      const uint8_t* scale = scales + (4 * lane_column() + x) * (kDim / 16) + group;
      values.scales[x] = kValueChunkDims == 32 ? *reinterpret_cast<const uint16_t*>(scale) : *scale;
    }
  }
  // Zeros for tokens that are not in `kept` (bit per token of the lane), whatever they were, and
  // for values that are not finite; whether there were any of these.
  static __device__ bool keep_finite(Values& values, uint32_t kept) {
    bool has_special = false;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      uint32_t& scales = values.scales[x];
      if ((kept >> x & 1u) == 0) scales = 0;
      if ((scales & 0x7Fu) == 0x7Fu) scales &= 0xFF00u, has_special = true;
      if ((scales & 0x7F00u) == 0x7F00u) scales &= 0xFFu, has_special = true;
    }
    return has_special;
  }
  // A value that is not finite, else 0: dim `i` of the chunk that the lane has of a token.
  static __device__ float special(const uint8_t*, const uint8_t* scales, int token, int chunk,
                                  int i) {
    const auto dim = static_cast<unsigned>(lane_row() * kValueChunkDims + i);
    const uint8_t scale = scales[token * (kDim / 16) + dim / 16];
    return (scale & 0x7F) == 0x7F ? NAN : 0.0f;
  }
  // The group scales of kGroup of the chunk's groups: of tokens (0, 1) and (2, 3).
  template <int kGroup>
  static __device__ void value_scales(const Values& values, uint32_t (&halves)[2]) {
    constexpr uint32_t kBytes = kGroup == 0 ? 0x0040 : 0x0051;
    halves[0] = e4m3_to_halves(permute(values.scales[0], values.scales[1], kBytes));
    halves[1] = e4m3_to_halves(permute(values.scales[2], values.scales[3], kBytes));
  }
  // Four dims of the chunk: pairs of tokens (0, 1) in first, (2, 3) in second; dims 0, 2, 1, 3.
  template <int kFour>
  static __device__ void four_values(const Values& values, uint32_t (&first)[4],
                                     uint32_t (&second)[4]) {
    constexpr int kWord = kFour / 2;
    uint32_t scales[2];
    value_scales<kWord / 2>(values, scales);
    expand_tokens<kFour % 2>(values.words[0][kWord], values.words[1][kWord], first);
    expand_tokens<kFour % 2>(values.words[2][kWord], values.words[3][kWord], second);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      first[i] = times(first[i], scales[0]);
      second[i] = times(second[i], scales[1]);
    }
  }
};

// FP8 E4M3, and 16-bit values: no scales.
template <int kDimension, int kElementBytes, bool kBf16>
struct PlainRows : RowPlaces<kDimension * kElementBytes> {
  using Places = RowPlaces<kDimension * kElementBytes>;
  static constexpr int kDim = kDimension;
  static constexpr bool kIsBf16 = kBf16;
  static constexpr bool kHasInfinities = kElementBytes == 2;
  static constexpr int kTileBytes = 16 * kDim * kElementBytes;
  static constexpr int kTileScaleBytes = 0;
  static constexpr int kStepTiles = std::max(4096 / kTileBytes, 1);
  static constexpr int kKeyChunkDims = Places::kKeyChunkBytes / kElementBytes;
  static constexpr int kValueChunkDims = Places::kValueChunkBytes / kElementBytes;
  static constexpr float kUndo = 1.0f;

  static __device__ constexpr int pair_dim(int pair, int second) { return 2 * pair + second; }

  struct Keys {
    uint32_t words[2][Places::kKeyChunkBytes / 4];
  };
  static __device__ void load_keys(const uint8_t* data, const uint8_t*,
                                   const typename Places::Lane& lane, int chunk, Keys& keys) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_words<Places::kKeyChunkBytes>(data + Places::key_at(lane, i, chunk), keys.words[i]);
  }
  template <int kEight>
  static __device__ void eight_keys(const Keys& keys, int token, uint32_t (&pairs)[4]) {
    if constexpr (kElementBytes == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = keys.words[token][4 * kEight + i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = keys.words[token][2 * kEight + i / 2];
        pairs[i] = e4m3_to_halves(i % 2 == 0 ? word & 0xFFFFu : word >> 16);
      }
    }
  }

  struct Values {
    uint32_t words[4][Places::kValueChunkBytes / 4];
  };
  static __device__ void load_values(const uint8_t* data, const uint8_t*,
                                     const typename Places::Lane& lane, int chunk, Values& values) {
#pragma unroll
    for (int x = 0; x < 4; ++x)
      load_words<Places::kValueChunkBytes>(data + Places::value_at(lane, x, chunk),
                                           values.words[x]);
  }
  static __device__ bool keep_finite(Values& values, uint32_t kept) {
    bool has_special = false;
#pragma unroll
    for (int x = 0; x < 4; ++x)
#pragma unroll
      for (uint32_t& word : values.words[x]) {
        if ((kept >> x & 1u) == 0) word = 0;
#pragma unroll
        for (int at = 0; at < 32; at += 8 * kElementBytes)
          if ((word >> at & kExponent) == kExponent) {
            word &= ~(kElement << at);
            has_special = true;
          }
      }
    return has_special;
  }
  static __device__ float special(const uint8_t* data, const uint8_t*, int token, int chunk,
                                  int i) {
    const int byte = token * Places::kUnits * 16 + chunk * 128 +
                     lane_row() * Places::kValueChunkBytes + i * kElementBytes;
    const uint8_t* at = data + Places::value_unit(byte / 16) * 16 + byte % 16;
    const uint32_t bits = kElementBytes == 1 ? *at : *reinterpret_cast<const uint16_t*>(at);
    if ((bits & kExponent) != kExponent) return 0.0f;
    const bool is_infinite = kElementBytes == 2 && (bits & kElement & ~kExponent & 0x7FFFu) == 0;
    if (!is_infinite) return NAN;
    return (bits & 0x8000u) != 0 ? -INFINITY : INFINITY;
  }
  template <int kFour>
  static __device__ void four_values(const Values& values, uint32_t (&first)[4],
                                     uint32_t (&second)[4]) {
    pair_tokens<kFour>(values.words[0], values.words[1], first);
    pair_tokens<kFour>(values.words[2], values.words[3], second);
  }

 private:
  static constexpr uint32_t kElement = kElementBytes == 1 ? 0xFFu : 0xFFFFu;
  // Bits that are all set in NaNs, and of 16-bit values in infinities.
  static constexpr uint32_t kExponent = kElementBytes == 1 ? 0x7Fu : kIsBf16 ? 0x7F80u : 0x7C00u;

  template <int kFour, int kWords>
  static __device__ void pair_tokens(const uint32_t (&a)[kWords], const uint32_t (&b)[kWords],
                                     uint32_t (&pairs)[4]) {
    if constexpr (kElementBytes == 2) {
      pairs[0] = permute(a[2 * kFour], b[2 * kFour], 0x5410);
      pairs[1] = permute(a[2 * kFour + 1], b[2 * kFour + 1], 0x5410);
      pairs[2] = permute(a[2 * kFour], b[2 * kFour], 0x7632);
      pairs[3] = permute(a[2 * kFour + 1], b[2 * kFour + 1], 0x7632);
    } else {
      const uint32_t low = permute(a[kFour], b[kFour], 0x5140);   // dims 0, 1
      const uint32_t high = permute(a[kFour], b[kFour], 0x7362);  // dims 2, 3
      pairs[0] = e4m3_to_halves(low & 0xFFFFu);
      pairs[1] = e4m3_to_halves(high & 0xFFFFu);
      pairs[2] = e4m3_to_halves(low >> 16);
      pairs[3] = e4m3_to_halves(high >> 16);
    }
  }
};

template <int kDim>
using Fp8Rows = PlainRows<kDim, 1, false>;
template <int kDim>
using Fp16Rows = PlainRows<kDim, 2, false>;
template <int kDim>
using Bf16Rows = PlainRows<kDim, 2, true>;

}  // namespace larder::kernels::cuda
