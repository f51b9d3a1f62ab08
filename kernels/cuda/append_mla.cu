// append, tuned: rows of MLA, a warp per token. The bytes are those of kernels/cpu/append.cpp.
// Compiled with -fmad=false.
#include "kernels/cuda/append_launch.cuh"
#include "kernels/cuda/kernels.h"

namespace larder::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kWarpRows = 2;  // tokens of a warp
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
template <MlaRow kRow>
constexpr int64_t kRowBytes = mla_row_bytes(kRow);

// Two rope values of a lane, 2 * lane and the next, turned by the row's position.
template <class Input>
__device__ uint32_t turn_pair(const RopeCall& rope, int64_t position, int lane, uint32_t word) {
  const int apart = rope.dim / 4;  // lanes between the two of a pair
  const uint32_t other =
      __shfl_sync(kAllLanes, word, rope.interleaved || lane < apart ? lane + apart : lane - apart);
  if (2 * lane >= rope.dim) return word;
  const float first = Input::exact(word & 0xFFFFu);
  const float second = Input::exact(word >> 16);
  if (rope.interleaved) {
    const CosineSine turn = cosine_sine(rope, position, lane);
    return Input::bits(rotated_first(first, second, turn)) |
           Input::bits(rotated_second(first, second, turn)) << 16;
  }
  const float others[2] = {Input::exact(other & 0xFFFFu), Input::exact(other >> 16)};
  const float own[2] = {first, second};
  uint32_t bits[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const CosineSine turn = cosine_sine(rope, position, pair_of(rope, 2 * lane + k));
    bits[k] = Input::bits(lane < apart ? rotated_first(own[k], others[k], turn)
                                       : rotated_second(others[k], own[k], turn));
  }
  return bits[0] | bits[1] << 16;
}

__device__ uint4 e4m3_group(const float* quotients /* [16] */) {
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = e4m3_pair(quotients[4 * i], quotients[4 * i + 1]) |
             e4m3_pair(quotients[4 * i + 2], quotients[4 * i + 3]) << 16;
  return {out[0], out[1], out[2], out[3]};
}

__device__ __noinline__ EncodedGroup encode_any_ds_group(const float* values) {
  EncodedGroup result;
  const Nvfp4Scale scale = nvfp4_ds_scale(group_amax(values));
  encode_codes(values, scale.inverse, reinterpret_cast<uint8_t*>(result.codes.words));
  result.scale = scale.byte;
  return result;
}

// As nvfp4_ds_scale, of a finite maximum, with few instructions.
__device__ Nvfp4Scale finite_ds_scale(float amax) {
  const Divisor six = {6.0f, 1.0f / 6.0f};
  const float wanted = fmaxf(quotient(amax, six), 0x1p-9f);
  uint32_t byte = e4m3_pair(wanted, 0.0f);
  if (positive_scale_value(byte) < wanted && byte < 0x7E) ++byte;
  return {static_cast<uint8_t>(byte), reciprocal_of(positive_scale_value(byte))};
}

__device__ EncodedGroup encode_ds_group(const Group& group) {
  if (!is_finite(group.amax)) {
    float values[kGroup];  // so that the group itself stays in registers
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = group.values[i];
    return encode_any_ds_group(values);
  }
  const Nvfp4Scale scale = finite_ds_scale(group.amax);
  return {scale.byte < 0x7E ? finite_codes<false>(group, scale.inverse)
                            : finite_codes<true>(group, scale.inverse),
          scale.byte};
}

// The 8 lanes of a tile share its maximum.
__device__ float tile_amax(const Group& group) {
  float amax = group.amax;
  for (int apart = 1; apart < 8; apart *= 2)
    amax = larger_or_nan(amax, __shfl_xor_sync(kAllLanes, amax, apart));
  return amax;
}

// Every lane takes part: with values that are not finite or with scales that are out of the
// ordinary all of them divide the long way.
__device__ uint4 encode_tile(const Group& group, float& scale) {
  float quotients[kGroup];
  const float amax = tile_amax(group);
  scale = fp8_ds_scale(amax);
  const bool is_plain = is_finite(amax) && scale >= 0x1p-64f && scale <= 0x1p64f;
  if (__all_sync(kAllLanes, is_plain)) {
    const Divisor divisor = {scale, reciprocal_of(scale)};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) quotients[i] = quotient(group.values[i], divisor);
    return e4m3_group(quotients);
  }
  float largest = 0.0f;  // without NaNs
#pragma unroll
  for (int i = 0; i < kGroup; ++i) largest = fmaxf(largest, fabsf(group.values[i]));
  for (int apart = 1; apart < 8; apart *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, apart));
  scale = fp8_ds_scale(largest);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) quotients[i] = __fdiv_rn(group.values[i], scale);
  return e4m3_group(quotients);
}

// Lane l has latent group l and rope values 2l and 2l + 1.
template <class Input, MlaRow kRow>
__device__ void store_row(const Words& words, uint32_t rope, const Divisor& k_scale, int lane,
                          uint8_t* target) {
  Group group = unpack<Input>(words);
  if (!is_finite(group.amax)) group = unpack<Input, true>(words);
  const float first = Input::exact(rope & 0xFFFFu);
  const float second = Input::exact(rope >> 16);
  if constexpr (kRow == MlaRow::kNvfp4Ds) {
    const EncodedGroup encoded = encode_ds_group(group);
    reinterpret_cast<uint2*>(target)[lane] = {encoded.codes.words[0], encoded.codes.words[1]};
    reinterpret_cast<uint16_t*>(target + 256)[lane] =
        static_cast<uint16_t>(e4m3_pair(first, second));
    target[nvfp4_ds_scale_place(lane)] = encoded.scale;
  } else if constexpr (kRow == MlaRow::kFp8Ds) {
    float scale;
    const uint4 bytes = encode_tile(group, scale);
    reinterpret_cast<uint4*>(target)[lane] = bytes;
    if (lane % 8 == 0) reinterpret_cast<float*>(target + 512)[lane / 8] = scale;
    reinterpret_cast<uint32_t*>(target + 528)[lane] = Bf16::bits(first) | Bf16::bits(second) << 16;
  } else if constexpr (kRow == MlaRow::kFp8) {
    float quotients[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) quotients[i] = quotient(group.values[i], k_scale);
    reinterpret_cast<uint4*>(target)[lane] = e4m3_group(quotients);
    reinterpret_cast<uint16_t*>(target + 512)[lane] =
        static_cast<uint16_t>(e4m3_pair(quotient(first, k_scale), quotient(second, k_scale)));
  } else {
    Words out = words;
    if constexpr (Input::kDtype != Dtype::kBf16) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        out.at[i] = Bf16::bits(group.values[2 * i]) | Bf16::bits(group.values[2 * i + 1]) << 16;
      rope = Bf16::bits(first) | Bf16::bits(second) << 16;
    }
    store_words_in_pairs(out, target + 32 * lane);
    reinterpret_cast<uint32_t*>(target + 1024)[lane] = rope;
  }
}

// Grid: x a CTA per 8 tokens, y a layer. Block: 4 warps, two tokens each, whose values are on their
// way together: 1152 bytes in, 352 to 1152 out. Bound by memory.
template <class Input, MlaRow kRow>
__global__ void __launch_bounds__(kWarps* kWarp, 8)
    append_mla_kernel(const __grid_constant__ RowsCall call, const PointOfUse use) {
  const RowsLayer& layer = call.layers[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kWarpRows;
  Words words[kWarpRows] = {};
  uint32_t ropes[kWarpRows] = {};
#pragma unroll
  for (int k = 0; k < kWarpRows; ++k) {
    if (first + k >= call.num_slots) continue;
    words[k] = load_words(layer.sources[0] + (first + k) * call.row_stride_bytes[0] +
                          lane * int64_t{sizeof(Words)});
    ropes[k] = __ldg(reinterpret_cast<const uint32_t*>(layer.sources[1] +
                                                       (first + k) * call.row_stride_bytes[1]) +
                     lane);
  }
  // A lane for each row: what it has read holds for all, so that they stay together.
  uint8_t* own_target = nullptr;
  int64_t own_position = 0;
  if (lane < kWarpRows) {
    PointOfUse reporting = use;
    if (blockIdx.y != 0) reporting.faults = nullptr;
    const TokenPlace place = find_token(call, reporting, layer.base, first + lane);
    if (place.page != nullptr && call.rope.dim != 0)
      own_position = position_of(call.rope, reporting, first + lane);
    if (place.page != nullptr && own_position >= 0)
      own_target = place.page + place.token * kRowBytes<kRow>;
  }
#pragma unroll
  for (int k = 0; k < kWarpRows; ++k) {
    auto* target = reinterpret_cast<uint8_t*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(own_target), k));
    if (target == nullptr) continue;
    if (call.rope.dim != 0)
      ropes[k] =
          turn_pair<Input>(call.rope, __shfl_sync(kAllLanes, own_position, k), lane, ropes[k]);
    store_row<Input, kRow>(words[k], ropes[k], layer.scales[0].one, lane, target);
  }
}

template <class Input>
void launch(MlaRow row, const RowsCall& call, dim3 grid, const PointOfUse& use,
            cudaStream_t stream) {
  const auto run = [&](auto kernel) { kernel<<<grid, kWarps * kWarp, 0, stream>>>(call, use); };
  switch (row) {
    case MlaRow::kNvfp4Ds:
      return run(append_mla_kernel<Input, MlaRow::kNvfp4Ds>);
    case MlaRow::kFp8Ds:
      return run(append_mla_kernel<Input, MlaRow::kFp8Ds>);
    case MlaRow::kFp8:
      return run(append_mla_kernel<Input, MlaRow::kFp8>);
    case MlaRow::kBf16:
      return run(append_mla_kernel<Input, MlaRow::kBf16>);
    case MlaRow::kNone:
      return;
  }
}

}  // namespace

Status supports_append_mla(const AppendParams& params) {
  if (params.layer.geometry.mla_row == MlaRow::kNone)
    return not_tuned("rows of K and V have another kernel");
  if (params.k.dtype != params.v.dtype) return not_tuned("latent and rope are of one dtype");
  if (params.rope.dim % 4 != 0) return not_tuned("rope.dim is a multiple of 4");
  return check_tuned_memory(params);
}

Status append_mla(const AppendParams& params, const Target& target) {
  if (params.num_slots == 0) return {};
  const auto run = [&](const RowsCall& call, unsigned num_layers, const PointOfUse& use) {
    constexpr int64_t kRows = kWarps * kWarpRows;
    const dim3 grid(static_cast<unsigned>((params.num_slots + kRows - 1) / kRows), num_layers);
    const MlaRow row = params.layer.geometry.mla_row;
    if (params.k.dtype == Dtype::kBf16)
      launch<Bf16>(row, call, grid, use, stream_of(target));
    else
      launch<Fp16>(row, call, grid, use, stream_of(target));
  };
  return launch_layers(params, target, call_of(params), true, run);
}

}  // namespace larder::kernels::cuda
