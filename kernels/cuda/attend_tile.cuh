// Attention of a few query rows and heads over a range of keys, by one CTA: what attend and
// sparse_mla share. They differ in where a key lies, in its place in the sequence, and in which
// keys a row sees.
//
// "Pair": a query row and a head; the pairs of a CTA share its KV head, so that K and V are decoded
// once for all of them. Products and sums of V are float32 (with compensation where a part is
// long), denominators float64.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_core.cuh"

namespace larder::kernels::cuda {

// The transform that stored keys have had, on one row in shared memory, by a warp.
__device__ inline void rotate_query(float* q, int k_dim, int rotation, float factor) {
  for (int h = 1; h < rotation; h *= 2) {
    __syncwarp();
    for (int pair = lane_index(); pair < k_dim / 2; pair += 32) {
      const int i = pair / h * 2 * h + pair % h;
      const float a = q[i];
      const float b = q[i + h];
      q[i] = a + b;
      q[i + h] = a - b;
    }
  }
  __syncwarp();
  for (int i = lane_index(); i < k_dim; i += 32) q[i] *= factor;
}

// Queries to shared memory, zeroed sums. Pair p is dealt with by warp p % kWarps, which gets in
// `shift` what centring took from the logits of its pairs.
__device__ inline void load_pairs(const AttendCore& core, const Pairs& pairs,
                                  const TileMemory& space, float (&shift)[kPairsPerWarp]) {
  const int k_dim = core.layer.k_dim;
  const int stride = q_stride(k_dim);
  for (int n = 0; n < kPairsPerWarp; ++n) {
    const int pair = warp_index() + n * kWarps;
    shift[n] = 0.0f;
    if (pair >= pairs.count()) continue;
    const int64_t first = core.q.row_index(pairs.row(pair), pairs.head(pair));
    float* q = space.q + pair * stride;
    const float* offset =
        core.key_offset == nullptr ? nullptr : core.key_offset + int64_t{pairs.kv_head} * k_dim;
    double product = 0.0;
    for (int i = lane_index(); i < stride; i += 32) {
      q[i] =
          i < k_dim ? load_value(core.q.dtype, core.q.data, first + i * core.q.strides[2]) : 0.0f;
      if (offset != nullptr && i < k_dim) product += double{q[i]} * offset[i];
    }
    if (offset != nullptr) shift[n] = static_cast<float>(core.scale * warp_sum(product));
    if (core.rotation > 1) rotate_query(q, k_dim, core.rotation, core.rotation_factor);
  }
  const int num_sums = pairs.count() * core.layer.v_dim;
  for (auto i = static_cast<int>(threadIdx.x); i < num_sums; i += kThreads) {
    space.sums[i] = 0.0f;
    if (core.shape.is_compensated) space.lost[i] = 0.0f;
  }
}

// Where the tile's keys lie, by the first warp.
template <typename Keys>
__device__ void locate_keys(const AttendCore& core, const Keys& keys, int64_t tile, int kv_head,
                            TileState& state) {
  const LayerRows& layer = core.layer;
  const int lane = lane_index();
  const int64_t key = tile + lane;
  int64_t block = 0;
  int32_t offset = 0;
  const bool is_present =
      key >= keys.begin && key < keys.end && keys.locate(core, key, block, offset);
  if (is_present) {
    const uint8_t* page = layer.base + block * layer.block_stride_bytes;
    const int64_t row = int64_t{kv_head} * layer.block_tokens + offset;
    state.k_rows[lane] = {page + layer.page.k_data_offset_bytes + row * layer.k_data_bytes,
                          page + layer.page.k_scale_offset_bytes + row * layer.k_scale_bytes};
    state.v_rows[lane] = {page + layer.page.v_data_offset_bytes + row * layer.v_data_bytes,
                          page + layer.page.v_scale_offset_bytes + row * layer.v_scale_bytes};
  }
  const uint32_t present = __ballot_sync(~0u, is_present);
  if (lane == 0) state.present = present;
}

// Dims [first, first + count) of the tile's keys, zeros up to a multiple of 4 and for keys that are
// not present.
template <typename Format>
__device__ void load_chunk(const TileState& state, int first, int count, float* chunk) {
  const int padded = (count + 3) / 4 * 4;
  for (int key = warp_index(); key < kTileKeys; key += kWarps) {
    const bool is_present = (state.present >> key & 1u) != 0;
    const StoredRow row = is_present ? state.k_rows[key] : StoredRow{};
#pragma unroll
    for (int n = 0; n < kChunkDims / 32; ++n) {
      const int i = lane_index() + 32 * n;
      if (i < padded)
        chunk[key * kChunkStride + i] =
            is_present && i < count ? Format::value(row, first + i) : 0.0f;
    }
  }
}

// q.k of this lane's key and the warp's pairs.
__device__ inline void multiply_keys(const AttendCore& core, int num_pairs, const TileState& state,
                                     const TileMemory& space, float (&products)[kPairsPerWarp]) {
  const LayerRows& layer = core.layer;
  const int stride = q_stride(layer.k_dim);
  for (float& product : products) product = 0.0f;
  for (int first = 0; first < layer.k_dim; first += kChunkDims) {
    const int count = min(kChunkDims, layer.k_dim - first);
    if (first > 0) __syncthreads();
    with_format(layer.mla_row, layer.k_format,
                [&](auto format) { load_chunk<decltype(format)>(state, first, count, space.k); });
    __syncthreads();
    const float* key = space.k + lane_index() * kChunkStride;
    const float* q = space.q + warp_index() * stride + first;
    for (int i = 0; i < count; i += 4) {
      const float4 k4 = *reinterpret_cast<const float4*>(key + i);
#pragma unroll
      for (int n = 0; n < kPairsPerWarp; ++n) {
        if (warp_index() + n * kWarps >= num_pairs) break;
        const float4 q4 = *reinterpret_cast<const float4*>(q + n * kWarps * stride + i);
        products[n] += k4.x * q4.x + k4.y * q4.y + (k4.z * q4.z + k4.w * q4.w);
      }
    }
  }
}

// Online softmax of one pair, by its warp. All lanes hold the same max and sum.
struct RunningSoftmax {
  float max = -INFINITY;
  double sum = 0.0;

  // Returns this lane's weight; `shrink` is for the sums so far.
  __device__ float add(float logit, bool is_seen, float& shrink) {
    const float tile_max = warp_max(is_seen ? logit : -INFINITY);  // NaNs are left out
    shrink = 1.0f;
    if (tile_max > max) {
      shrink = expf(max - tile_max);  // 0 before the first key
      max = tile_max;
      sum *= shrink;
    }
    // While every logit is -inf, any finite base gives weights of 0; -inf - -inf would not.
    const float base = max == -INFINITY ? 0.0f : max;
    const float weight = is_seen ? expf(logit - base) : 0.0f;
    sum += warp_sum(weight);
    return weight;
  }
};

// Products -> weights in shared memory, and what each pair sees.
template <typename Keys>
__device__ void soften_tile(const AttendCore& core, const Pairs& pairs, const Keys& keys,
                            int64_t tile, const float (&products)[kPairsPerWarp],
                            const float (&shift)[kPairsPerWarp],
                            RunningSoftmax (&softmax)[kPairsPerWarp], TileState& state,
                            const TileMemory& space) {
  const int lane = lane_index();
  const int64_t place = keys.place(tile + lane);
#pragma unroll
  for (int n = 0; n < kPairsPerWarp; ++n) {
    const int pair = warp_index() + n * kWarps;
    if (pair >= pairs.count()) break;
    const int32_t token = pair / pairs.num_heads;
    const bool is_seen = (state.present >> lane & 1u) != 0 && keys.sees(token, place);
    float logit = products[n] * core.logit_scale;
    if (core.key_offset != nullptr) logit += shift[n];
    if (core.soft_cap > 0.0f) logit = core.soft_cap * tanhf(logit / core.soft_cap);
    if (core.alibi_slopes != nullptr)
      logit +=
          core.alibi_slopes[pairs.head(pair)] * static_cast<float>(place - keys.position(token));
    const uint32_t seen = __ballot_sync(~0u, is_seen);
    float shrink = 1.0f;
    float weight = 0.0f;
    if (seen != 0) weight = softmax[n].add(logit, is_seen, shrink);
    space.weights[pair * kTileKeys + lane] = weight;
    if (lane == 0) {
      state.seen[pair] = seen;
      state.shrink[pair] = shrink;
    }
  }
}

// A pair's sum over the tile of weight * V of one dim. A key that is not seen is skipped: a weight
// of 0 would not keep out a NaN or an infinity.
__device__ inline float weigh_values(const float (&values)[kTileKeys], const float* weights,
                                     uint32_t seen, bool sees_all) {
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int key = 0; key < kTileKeys; key += 4) {
    const float4 weight = *reinterpret_cast<const float4*>(weights + key);
    if (sees_all || (seen >> key & 1u) != 0) sum.x += weight.x * values[key];
    if (sees_all || (seen >> key & 2u) != 0) sum.y += weight.y * values[key + 1];
    if (sees_all || (seen >> key & 4u) != 0) sum.z += weight.z * values[key + 2];
    if (sees_all || (seen >> key & 8u) != 0) sum.w += weight.w * values[key + 3];
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}

// sums = sums * shrink + added; with `lost`, what rounding changes is kept there. Infinities and
// NaNs have nothing to keep.
__device__ inline void add_to_sum(float& sum, float* lost, float shrink, float added) {
  if (lost == nullptr) {
    sum = sum * shrink + added;
    return;
  }
  const float old = __fmul_rn(sum, shrink);
  const float wanted = __fsub_rn(added, __fmul_rn(*lost, shrink));
  const float made = __fadd_rn(old, wanted);
  *lost = isfinite(made) ? __fsub_rn(__fsub_rn(made, old), wanted) : 0.0f;
  sum = made;
}

// Each thread owns dims thread, thread + kThreads, ... of all pairs.
template <typename Format>
__device__ void add_values(const AttendCore& core, int num_pairs, const TileState& state,
                           const TileMemory& space) {
  const uint32_t present = state.present;
  const int v_dim = core.layer.v_dim;
  for (auto i = static_cast<int>(threadIdx.x); i < v_dim; i += kThreads) {
    float values[kTileKeys];
#pragma unroll
    for (int key = 0; key < kTileKeys; ++key)
      values[key] = (present >> key & 1u) != 0 ? Format::value(state.v_rows[key], i) : 0.0f;
    for (int pair = 0; pair < num_pairs; ++pair) {
      const uint32_t seen = state.seen[pair];
      if (seen == 0) continue;
      const float* weights = space.weights + pair * kTileKeys;
      const float added = seen == present ? weigh_values(values, weights, seen, true)
                                          : weigh_values(values, weights, seen, false);
      const int at = pair * v_dim + i;
      add_to_sum(space.sums[at], core.shape.is_compensated ? space.lost + at : nullptr,
                 state.shrink[pair], added);
    }
  }
}

// The result, or with several parts what join_parts takes. Without keys there are no sums.
__device__ inline void store_pairs(const AttendCore& core, const Pairs& pairs, bool has_keys,
                                   const PartState (&states)[kPairsPerWarp], TileState& state,
                                   const TileMemory& space) {
  const int v_dim = core.layer.v_dim;
  const bool is_whole = core.parts.count == 1;
  const auto part_index = [&](int pair) {
    const int64_t row = pairs.row(pair) - core.parts.first_row;
    return (row * core.output.out.shape[1] + pairs.head(pair)) * core.parts.count + pairs.part;
  };
#pragma unroll
  for (int n = 0; n < kPairsPerWarp; ++n) {
    const int pair = warp_index() + n * kWarps;
    if (pair >= pairs.count() || lane_index() != 0) break;
    if (is_whole) {
      state.made[pair] = normaliser(states[n], core.value_scale, core.sinks, pairs.head(pair));
      store_lse(core.output, pairs.row(pair), pairs.head(pair), state.made[pair].lse, core.sinks);
    } else {
      core.parts.states[part_index(pair)] = states[n];
    }
  }
  if (!is_whole && !has_keys) return;
  __syncthreads();
  for (int pair = 0; pair < pairs.count(); ++pair) {
    float* sums = space.sums + pair * v_dim;
    for (auto i = static_cast<int>(threadIdx.x); i < v_dim; i += kThreads) {
      if (core.shape.is_compensated && has_keys) sums[i] -= space.lost[pair * v_dim + i];
      if (is_whole)
        sums[i] = state.made[pair].is_zero ? 0.0f : sums[i] * state.made[pair].factor;
      else
        core.parts.sums[part_index(pair) * v_dim + i] = sums[i];
    }
  }
  if (!is_whole) return;
  __syncthreads();
  for (int pair = 0; pair < pairs.count(); ++pair)
    store_output(core.output, pairs.row(pair), pairs.head(pair), space.sums + pair * v_dim, v_dim,
                 static_cast<int>(threadIdx.x), kThreads);
}

// All keys [keys.begin, keys.end), for the pairs. Every thread of the CTA has the same arguments.
template <typename Keys>
__device__ void attend_pairs(const AttendCore& core, const Pairs& pairs, const Keys& keys,
                             TileState& state, const TileMemory& space) {
  float shift[kPairsPerWarp];
  float products[kPairsPerWarp];
  RunningSoftmax softmax[kPairsPerWarp];
  const bool has_keys = keys.begin < keys.end;
  if (has_keys) load_pairs(core, pairs, space, shift);
  for (int64_t tile = keys.begin / kTileKeys * kTileKeys; tile < keys.end; tile += kTileKeys) {
    __syncthreads();  // queries and zeros are there, and the last tile has been read
    if (warp_index() == 0) locate_keys(core, keys, tile, pairs.kv_head, state);
    __syncthreads();
    if (state.present == 0) continue;
    multiply_keys(core, pairs.count(), state, space, products);
    soften_tile(core, pairs, keys, tile, products, shift, softmax, state, space);
    __syncthreads();
    with_format(core.layer.mla_row, core.layer.v_format, [&](auto format) {
      add_values<decltype(format)>(core, pairs.count(), state, space);
    });
  }
  PartState states[kPairsPerWarp];
#pragma unroll
  for (int n = 0; n < kPairsPerWarp; ++n) {
    states[n] = {softmax[n].sum, 0.0, softmax[n].max};
    const int pair = warp_index() + n * kWarps;
    if (core.alibi_slopes != nullptr && pair < pairs.count())
      states[n].shift =
          double{core.alibi_slopes[pairs.head(pair)]} * static_cast<double>(keys.tokens_before());
  }
  __syncthreads();  // zeros, where no tile had a key
  store_pairs(core, pairs, has_keys, states, state, space);
  __syncthreads();  // before the shared memory is taken again
}

}  // namespace larder::kernels::cuda
