// Elements as tensors and pools hold them, read one at a time: strided views, stored rows of every
// format, MLA rows. And how kernels look at slots and tables that nobody has checked before them.
#pragma once

#include <cstdint>

#include "kernels/cuda/codes.cuh"
#include "kernels/params.h"
#include "kernels/target.h"

namespace larder::kernels::cuda {

// Pages may begin at any byte: base, strides and regions of odd size are legal.
__device__ inline uint16_t load_u16(const uint8_t* bytes) {
  if ((reinterpret_cast<uintptr_t>(bytes) & 1) == 0)
    return *reinterpret_cast<const uint16_t*>(bytes);
  return static_cast<uint16_t>(uint32_t{bytes[0]} | uint32_t{bytes[1]} << 8);
}
__device__ inline float load_f32(const uint8_t* bytes) {
  if ((reinterpret_cast<uintptr_t>(bytes) & 3) == 0) return *reinterpret_cast<const float*>(bytes);
  return __uint_as_float(uint32_t{bytes[0]} | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 |
                         uint32_t{bytes[3]} << 24);
}

// bf16, fp16 or fp32.
__device__ inline float load_value(Dtype dtype, const void* data, int64_t index) {
  if (dtype == Dtype::kFp32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == Dtype::kBf16 ? bf16_value(bits) : fp16_value(bits);
}

__device__ inline void store_value(Dtype dtype, void* data, int64_t index, float value) {
  if (dtype == Dtype::kFp32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] =
        dtype == Dtype::kBf16 ? bf16_bits(value) : fp16_bits(value);
  }
}

// Element i of a stored row of K or V, without the tensor's scale: exact in float. `scales` is the
// row's first scale byte (nvfp4 only).
__device__ inline float stored_value(KvFormat format, const uint8_t* data, const uint8_t* scales,
                                     int i) {
  switch (format) {
    case KvFormat::kBf16:
      return bf16_value(load_u16(data + 2 * i));
    case KvFormat::kFp16:
      return fp16_value(load_u16(data + 2 * i));
    case KvFormat::kFp8E4m3:
      return e4m3_value(data[i]);
    case KvFormat::kFp8E5m2:
      return e5m2_value(data[i]);
    case KvFormat::kNvfp4:
      return e2m1_value(uint32_t{data[i >> 1]} >> 4 * (i & 1)) * e4m3_value(scales[i >> 4]);
  }
  return 0.0f;
}

// Element i (latent, then rope) of an MLA row, without k_scale.
__device__ inline float stored_mla_value(MlaRow format, const uint8_t* row, int i) {
  switch (format) {
    case MlaRow::kNvfp4Ds: {
      if (i >= kMlaLatentDim) return e4m3_value(row[256 + i - kMlaLatentDim]);
      const int group = i >> 4;
      return e2m1_value(uint32_t{row[i >> 1]} >> 4 * (i & 1)) *
             e4m3_value(row[320 + 8 * (group & 3) + (group >> 2)]);
    }
    case MlaRow::kFp8Ds:
      if (i >= kMlaLatentDim) return bf16_value(load_u16(row + 528 + 2 * (i - kMlaLatentDim)));
      return e4m3_value(row[i]) * load_f32(row + 512 + 4 * (i >> 7));
    case MlaRow::kFp8:
      return e4m3_value(row[i]);
    case MlaRow::kBf16:
      return bf16_value(load_u16(row + 2 * i));
    case MlaRow::kNone:
      break;
  }
  return 0.0f;
}

// A slot, an entry or a length, of which the sender may change his mind at any time: what has been
// checked is what is used.
template <typename T>
__device__ inline T load_once(const T* value) {
  return *const_cast<const volatile T*>(value);
}

// What Target says about rights and faults, by value.
struct PointOfUse {
  BlockRights rights;
  CallFaults* faults = nullptr;

  __device__ void report(int64_t value) const {
    if (faults != nullptr && atomicAdd(&faults->count, 1u) == 0) faults->first_value = value;
  }
  // Whether a block may be used; a fault is reported for one that may not. `named`: what the report
  // shows, the slot or the block.
  __device__ bool may_use(int64_t block, int64_t num_blocks, bool write, int64_t named) const {
    if (block >= 0 && block < num_blocks) {
      if (rights.words == nullptr) return true;
      const uint64_t word = load_once(rights.words + block);
      if (word == rights.own || (!write && word == rights.shared)) return true;
    }
    report(named);
    return false;
  }
};

inline PointOfUse point_of_use(const Target& target) {
  return {target.rights == nullptr ? BlockRights{} : *target.rights, target.faults};
}

}  // namespace larder::kernels::cuda
