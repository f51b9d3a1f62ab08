// The work of a CTA on output rows of MLA layers: 64 threads have the latent of a row, and 8 of
// another warp its rope, each of them eight elements.
#pragma once

#include <cstdint>

#include "kernels/cuda/gather_call.cuh"
#include "kernels/cuda/gather_eight.cuh"
#include "kernels/cuda/gather_tokens.cuh"

namespace larder::kernels::cuda {

inline constexpr int kMlaLatentEights = kMlaLatentDim / kEight;
inline constexpr int kMlaRopeEights = kMlaRopeDim / kEight;
inline constexpr int kMlaRowsAtOnce = 4;
inline constexpr int kMlaLatentThreads = kMlaRowsAtOnce * kMlaLatentEights;
inline constexpr int kMlaThreads = kMlaLatentThreads + kMlaRowsAtOnce * kMlaRopeEights;
static_assert(kMlaLatentThreads % kWarp == 0 && kMlaThreads % kWarp == 0);
static_assert(kMlaThreads >= kReporters + kMaxRows);

// Loads of a thread that are in flight together: of 4 bytes twice as many as of more.
template <MlaRow kRow, bool kRope>
constexpr int kMlaBatch = kRow == MlaRow::kNvfp4Ds && !kRope ? 8 : 4;

// A row of a CTA.
struct MlaSource {
  const uint8_t* row;  // or nullptr: nothing
  uint8_t* out;
};
__device__ inline MlaSource mla_source_of(const GatherSide& side, const GatherRun& run) {
  if (run.count == 0) return {};
  return {run.page + run.token * side.data_bytes, out_row(side.out, run.row, 0)};
}

struct StoredMlaEight {
  StoredEight stored;
  float tile_scale;  // of fp8_ds
};

__host__ __device__ constexpr KvFormat latent_format(MlaRow row) {
  return row == MlaRow::kNvfp4Ds ? KvFormat::kNvfp4
         : row == MlaRow::kBf16  ? KvFormat::kBf16
                                 : KvFormat::kFp8E4m3;
}
__host__ __device__ constexpr KvFormat rope_format(MlaRow row) {
  return row == MlaRow::kFp8Ds || row == MlaRow::kBf16 ? KvFormat::kBf16 : KvFormat::kFp8E4m3;
}
__host__ __device__ constexpr int rope_offset(MlaRow row) {
  return row == MlaRow::kNvfp4Ds ? 256
         : row == MlaRow::kFp8Ds ? 528
         : row == MlaRow::kFp8   ? 512
                                 : 1024;
}

__host__ __device__ constexpr KvFormat part_format(MlaRow row, bool is_rope) {
  return is_rope ? rope_format(row) : latent_format(row);
}

template <MlaRow kRow, bool kRope>
__device__ inline StoredMlaEight load_mla_eight(const uint8_t* row, int eight) {
  constexpr KvFormat kFormat = part_format(kRow, kRope);
  if constexpr (kRope) {
    const int offset = rope_offset(kRow) + (eight - kMlaLatentEights) * eight_bytes(kFormat);
    return {load_eight<kFormat>(row + offset, nullptr), 1.0f};
  }
  const int group = eight / 2;
  return {load_eight<kFormat>(row + eight * eight_bytes(kFormat),
                              row + 320 + 8 * (group & 3) + (group >> 2)),
          kRow == MlaRow::kFp8Ds ? __ldg(reinterpret_cast<const float*>(row + 512) + eight / 16)
                                 : 1.0f};
}

// The first of the eight elements is at `out`. False if nothing is written since a NaN may be among
// them.
template <MlaRow kRow, bool kRope, bool kStages>
__device__ inline bool write_mla_eight(const GatherCall& call, const StoredMlaEight& stored,
                                       uint8_t* out) {
  constexpr KvFormat kFormat = part_format(kRow, kRope);
  constexpr bool kHasTileScale = kRow == MlaRow::kFp8Ds && !kRope;
  const GatherSide& side = call.sides[0];
  const uint32_t* words = stored.stored.words;
  if (kRow == MlaRow::kBf16 && side.keeps_bits) {
    put(out, uint4{words[0], words[1], words[2], words[3]});
    return true;
  }
  if (kStages && (kRow == MlaRow::kFp8 || (kRope && call.copies_rope))) {
    put(out, uint2{words[0], words[1]});
    return true;
  }
  if (any_nan<kFormat>(stored.stored)) return false;
  if (!kHasTileScale && !kStages && side.scale == 1.0f &&
      write_exactly<kFormat>(stored.stored, side.out.dtype, out))
    return true;
  Eight eight = decode_eight<kFormat>(stored.stored);
  if constexpr (kHasTileScale) {
    if (!isfinite(stored.tile_scale)) return false;
    multiply_eight(eight, stored.tile_scale);
  }
  if constexpr (kStages) {
    put(out, e4m3_of(eight, call.staged_scale));
  } else {
    if (kRow == MlaRow::kFp8 && side.scale != 1.0f) multiply_eight(eight, side.scale);
    put(out, halves_of(eight, side.out.dtype));
  }
  return true;
}

// A thread's eight elements of every fourth row from `row` on.
template <MlaRow kRow, bool kRope, bool kStages>
__device__ inline void gather_mla_part(const GatherCall& call, const MlaSource* sources,
                                       int num_rows, int row, int eight) {
  constexpr int kBatch = kMlaBatch<kRow, kRope>;
  constexpr int kOutBytes = kStages ? 1 : 2;
  const int out_offset = eight * kEight * kOutBytes;
#pragma unroll 1
  for (; row < num_rows; row += kBatch * kMlaRowsAtOnce) {
    const auto source_at = [&](int i) {
      const int at = row + i * kMlaRowsAtOnce;
      return at < num_rows ? sources[at] : MlaSource{};
    };
    StoredMlaEight stored[kBatch];
    uint32_t present = 0;  // a bit each
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const MlaSource source = source_at(i);
      if (source.row == nullptr) continue;
      stored[i] = load_mla_eight<kRow, kRope>(source.row, eight);
      present |= 1u << i;
    }
    asm volatile("" ::: "memory");  // rows are read again rather than kept in registers
    uint32_t left = 0;              // a bit each: those with a NaN
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if ((present >> i & 1u) != 0 &&
          !write_mla_eight<kRow, kRope, kStages>(
              call, stored[i], sources[row + i * kMlaRowsAtOnce].out + out_offset))
        left |= 1u << i;
    }
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const MlaSource source = source_at(__ffs(static_cast<int>(left)) - 1);
#pragma unroll 1
      for (int e = 0; e < kEight; ++e)
        write_mla_element(call, source.row, source.out, eight * kEight + e);
    }
  }
}

template <MlaRow kRow, bool kStages>
__device__ inline void gather_mla(const GatherCall& call, const MlaSource* sources, int num_rows) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kMlaLatentThreads) {
    gather_mla_part<kRow, false, kStages>(call, sources, num_rows, thread / kMlaLatentEights,
                                          thread % kMlaLatentEights);
  } else {
    const int rope = thread - kMlaLatentThreads;
    gather_mla_part<kRow, true, kStages>(call, sources, num_rows, rope / kMlaRopeEights,
                                         kMlaLatentEights + rope % kMlaRopeEights);
  }
}

}  // namespace larder::kernels::cuda
