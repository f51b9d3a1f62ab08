// append, tuned: rows of K and V whose dim is a power of two, read and written in units of 16
// values per thread. The bytes are those of kernels/cpu/append.cpp. Compiled with -fmad=false.
#include <algorithm>
#include <bit>

#include "kernels/cuda/append_codecs.cuh"
#include "kernels/cuda/append_feed.cuh"
#include "kernels/cuda/append_keys.cuh"
#include "kernels/cuda/append_launch.cuh"
#include "kernels/cuda/kernels.h"

namespace larder::kernels::cuda {
namespace {

// What becomes of keys on their way.
enum class Keys { kUnchanged, kTransformed /* centred or rotated */, kTurned /* and RoPE */ };

// A thread's group of one token, of which it has all items of the CTA's part.
struct Share {
  int begin;  // items [begin, end)
  int end;
  int64_t row;
  int token;  // within the CTA
  int index;  // of the group in its row
  TokenPlace place;
};

template <class Codec>
__device__ GroupPlace place_of(const RowsCall& call, const Share& share, int item, int parity) {
  const uint32_t group = ((static_cast<uint32_t>(share.place.token)) << call.groups_shift) +
                         share.index + (item >> 1) * call.step_groups;
  return {share.place.page, call.data_offset_bytes[parity] + group * Codec::kDataBytes,
          call.scale_offset_bytes[parity] + group};
}

// The groups that are not finite, again. By all threads of a warp, of which one has some.
template <class Input, class Codec, Keys kKeys>
__device__ __noinline__ void append_plainly(const RowsCall& call, const RowsLayer& layer,
                                            const KeyTables& tables, const Share& share) {
  for (int item = share.begin; item < share.end; ++item) {
    const int parity = item & 1;
    const bool is_key = kKeys != Keys::kUnchanged && call.is_key[parity];
    const uint8_t* source = layer.sources[parity] + share.row * call.row_stride_bytes[parity] +
                            (item >> 1) * call.step_source_bytes[parity] +
                            share.index * int64_t{sizeof(Words)};
    Words words = {};
    if (share.place.page != nullptr) {
      words = load_words(source);
      if (is_key && call.rope.dim != 0) {
        const int apart = groups_to_other(call.rope, share.index);
        turn_group<Input>(call.rope, share.index,
                          load_words(source + apart * int64_t{sizeof(Words)}),
                          tables.turns_of(call, share.token), words);
      }
    }
    Group group = unpack<Input, true>(words);
    const bool changed = is_key && call.changes_keys;
    if (changed) transform<true>(call, tables, item >> call.head_shift, share.index, group);
    if (share.place.page == nullptr || is_finite(group.amax) ||
        Codec::template copies<Input>(changed))
      continue;
    Codec::store_any(layer.scales[parity], group, place_of<Codec>(call, share, item, parity));
  }
}

// One item, of which the feed has the oldest. Returns whether its group came out right.
template <class Input, class Codec, Keys kKeys, int kParity>
__device__ bool append_item(const RowsCall& call, const RowsLayer& layer, const KeyTables& tables,
                            const Share& share, const Feed& feed, int item) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Words words = feed.take(lane);
  const bool is_key = kKeys != Keys::kUnchanged && call.is_key[kParity];
  if constexpr (kKeys == Keys::kTurned)
    if (is_key && share.place.page != nullptr)
      turn_group<Input>(call.rope, share.index,
                        feed.take(lane + groups_to_other(call.rope, share.index)),
                        tables.turns_of(call, share.token), words);
  Group group = unpack<Input>(words);
  const bool changed = is_key && call.changes_keys;
  if constexpr (kKeys != Keys::kUnchanged)
    if (changed) transform<false>(call, tables, item >> call.head_shift, share.index, group);
  Codec::template store<Input>(layer.scales[kParity], words, group, changed,
                               place_of<Codec>(call, share, item, kParity));
  return is_finite(group.amax) || Codec::template copies<Input>(changed);
}

// Grid: x a CTA per part of the items (K or V of a head) of 4 tiles of tokens, y a layer. Block: 4
// warps, a tile each. A tile is as many tokens as have 32 groups of 16 values in one head: 4 of dim
// 128. While a warp encodes an item, the 1 KiB of each of the next three are on their way to shared
// memory. It writes (nvfp4) 256 bytes of data and a sector of scales where tokens are neighbours in
// their block. Bytes per value: 2 in, and 0.5625 (nvfp4), 1 or 2 out. Bound by memory, but for the
// encoders that search (see kernels/README.md).
template <class Input, class Codec, Keys kKeys>
__global__ void __launch_bounds__(kWarps* kWarp, 8)
    append_rows_kernel(const __grid_constant__ RowsCall call, const PointOfUse use) {
  __shared__ __align__(16) uint8_t rings[kWarps][kStages * kItemBytes];
  const RowsLayer& layer = call.layers[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int part = static_cast<int>(blockIdx.x % static_cast<unsigned>(call.num_parts));
  Share share;
  share.begin = part * call.part_items;
  share.end = min(call.num_items, share.begin + call.part_items);
  share.index = lane & ((1 << call.groups_shift) - 1);
  share.token = static_cast<int>(threadIdx.x) >> call.groups_shift;
  const int64_t tile =
      int64_t{blockIdx.x / static_cast<unsigned>(call.num_parts)} * kWarps + threadIdx.x / kWarp;
  const int64_t first_row = tile * (kWarp >> call.groups_shift);
  share.row = first_row + (lane >> call.groups_shift);
  Feed feed(call, layer, rings[threadIdx.x / kWarp], first_row, share.begin, share.end);
  static_assert(kStages == 4);
  feed.copy_next<0>();  // without waiting for slots
  feed.copy_next<1>();
  feed.copy_next<0>();

  PointOfUse reporting = use;
  if (part != 0 || share.index != 0 || blockIdx.y != 0) reporting.faults = nullptr;
  share.place = find_token(call, reporting, layer.base, share.row);
  [[maybe_unused]] KeyTables tables;
  if (call.looks_at_positions && share.place.page != nullptr &&
      position_of(call.rope, reporting, share.row) < 0)
    share.place.page = nullptr;
  if constexpr (kKeys == Keys::kTurned)
    if (!tables.find_turns(call, reporting, share.row, share.place.page != nullptr, share.token,
                           share.index == 0))
      share.place.page = nullptr;
  if constexpr (kKeys != Keys::kUnchanged)
    tables.copy_offsets(call, layer, share.begin >> call.head_shift,
                        (share.end - 1) >> call.head_shift);
  if (__ballot_sync(0xFFFFFFFFu, share.place.page != nullptr) == 0) return;

  bool is_right = true;
  for (int item = share.begin & ~1; item < share.end; item += 2) {
    feed.wait();
    feed.copy_next<1>();
    if (item >= share.begin)
      is_right &= append_item<Input, Codec, kKeys, 0>(call, layer, tables, share, feed, item);
    feed.wait();
    feed.copy_next<0>();
    if (item + 1 < share.end)
      is_right &= append_item<Input, Codec, kKeys, 1>(call, layer, tables, share, feed, item + 1);
  }
  if (__all_sync(0xFFFFFFFFu, is_right)) return;
  append_plainly<Input, Codec, kKeys>(call, layer, tables, share);
}

template <class Input, class Codec>
void launch(const RowsCall& call, dim3 grid, const PointOfUse& use, cudaStream_t stream) {
  const size_t bytes = key_tables_bytes(call);
  if (call.rope.dim != 0)
    append_rows_kernel<Input, Codec, Keys::kTurned>
        <<<grid, kWarps * kWarp, bytes, stream>>>(call, use);
  else if (call.changes_keys)
    append_rows_kernel<Input, Codec, Keys::kTransformed>
        <<<grid, kWarps * kWarp, bytes, stream>>>(call, use);
  else
    append_rows_kernel<Input, Codec, Keys::kUnchanged>
        <<<grid, kWarps * kWarp, 0, stream>>>(call, use);
}

template <class Input>
void launch(KvFormat format, Encoder encoder, const RowsCall& call, dim3 grid,
            const PointOfUse& use, cudaStream_t stream) {
  switch (format) {
    case KvFormat::kBf16:
      return launch<Input, Rows16<Bf16>>(call, grid, use, stream);
    case KvFormat::kFp16:
      return launch<Input, Rows16<Fp16>>(call, grid, use, stream);
    case KvFormat::kFp8E4m3:
      return launch<Input, Rows8<false>>(call, grid, use, stream);
    case KvFormat::kFp8E5m2:
      return launch<Input, Rows8<true>>(call, grid, use, stream);
    case KvFormat::kNvfp4:
      break;
  }
  switch (encoder) {
    case Encoder::kReference:
      return launch<Input, Rows4<Encoder::kReference>>(call, grid, use, stream);
    case Encoder::kFourOverSix:
      return launch<Input, Rows4<Encoder::kFourOverSix>>(call, grid, use, stream);
    case Encoder::kBestScale:
      return launch<Input, Rows4<Encoder::kBestScale>>(call, grid, use, stream);
  }
}

constexpr int64_t kWantedCtas = 1024;  // that keep a large GPU busy

// One launch: K and V together where they are alike, else one of them.
struct Launch {
  int first_side;
  int num_sides;
  KvFormat format;
  Dtype dtype;
  int dim;
};

bool is_alike(const AppendParams& params) {
  const AttentionGeometry& geometry = params.layer.geometry;
  return geometry.k_format == geometry.v_format && geometry.k_dim == geometry.v_dim &&
         params.k.dtype == params.v.dtype;
}

RowsCall call_of(const AppendParams& params, const Launch& launch) {
  RowsCall call = larder::kernels::cuda::call_of(params);
  const LayerView& layer = params.layer;
  const PageLayout& page = layer.page;
  const bool is_both = launch.num_sides == 2;
  call.groups_shift = std::countr_zero(static_cast<unsigned>(launch.dim / kGroup));
  call.num_items = launch.num_sides * layer.geometry.num_kv_heads;
  call.head_shift = is_both ? 1 : 0;
  const uint32_t head_groups = uint32_t{1} << (call.block_shift + call.groups_shift);
  call.step_groups = is_both ? head_groups : 2 * head_groups;
  const int64_t apart = (kWarp / 2) >> call.groups_shift;  // tokens; 0: in the same row
  for (int parity = 0; parity < 2; ++parity) {
    const int side = is_both ? parity : launch.first_side;
    const TensorView& view = side == 0 ? params.k : params.v;
    const uint32_t first_group = is_both ? 0 : static_cast<uint32_t>(parity) * head_groups;
    call.row_stride_bytes[parity] = stride_bytes(view, 0);
    call.step_source_bytes[parity] = (is_both ? 1 : 2) * stride_bytes(view, 1);
    call.second_unit_bytes[parity] =
        apart > 0 ? apart * call.row_stride_bytes[parity] : kItemBytes / 2;
    call.data_offset_bytes[parity] =
        static_cast<uint32_t>(side == 0 ? page.k_data_offset_bytes : page.v_data_offset_bytes) +
        first_group * static_cast<uint32_t>(row_data_bytes(launch.format, kGroup));
    call.scale_offset_bytes[parity] =
        static_cast<uint32_t>(side == 0 ? page.k_scale_offset_bytes : page.v_scale_offset_bytes) +
        first_group;
    call.is_key[parity] = side == 0;
  }
  call.changes_keys = launch.first_side == 0 && layer.key_transform != KeyTransform::kNone;
  call.centred = call.changes_keys && is_centred(layer.key_transform);
  call.rotated = is_rotated(layer.key_transform);
  if (launch.first_side != 0) {
    // A row whose key has no position is left out of V too.
    call.looks_at_positions = call.rope.dim != 0;
    call.rope.dim = 0;
  }
  return call;
}

// Layers come with K and V; a launch of one of them goes by the parity of heads.
void go_by_parity(const AppendParams& params, const Launch& launch, RowsCall& call,
                  unsigned num_layers) {
  if (launch.num_sides == 2) return;
  const TensorView& view = launch.first_side == 0 ? params.k : params.v;
  for (unsigned i = 0; i < num_layers; ++i) {
    RowsLayer& layer = call.layers[i];
    const uint8_t* source = layer.sources[launch.first_side];
    layer.sources[0] = source;
    layer.sources[1] = source + stride_bytes(view, 1);
    layer.scales[0] = layer.scales[1] = layer.scales[launch.first_side];
  }
}

// Of all layers. Few tokens: the items are spread over more CTAs. Many: where encoding takes about
// as long as moving, two CTAs for each four tiles, so that the last ones end close together.
unsigned share_items(unsigned num_layers, KvFormat format, RowsCall& call) {
  const bool is_balanced =
      !call.changes_keys && call.rope.dim == 0 && row_data_bytes(format, kGroup) < 2 * kGroup;
  const int64_t tokens = kWarps * (kWarp >> call.groups_shift);
  const int64_t tiles = (call.num_slots + tokens - 1) / tokens;
  const int64_t wanted = std::max<int64_t>(kWantedCtas / (tiles * num_layers), is_balanced ? 2 : 1);
  const int64_t parts = std::min<int64_t>(wanted, call.num_items);
  call.part_items = static_cast<int>((call.num_items + parts - 1) / parts);
  if (call.centred)
    call.part_items =
        std::min(call.part_items, kMaxOffsets / (kGroup << call.groups_shift) << call.head_shift);
  call.num_parts = (call.num_items + call.part_items - 1) / call.part_items;
  return static_cast<unsigned>(tiles * call.num_parts);
}

Status launch_side(const AppendParams& params, const Launch& side, const Target& target) {
  const auto run = [&](RowsCall& call, unsigned num_layers, const PointOfUse& use) {
    go_by_parity(params, side, call, num_layers);
    const dim3 grid(share_items(num_layers, side.format, call), num_layers);
    if (side.dtype == Dtype::kBf16)
      launch<Bf16>(side.format, params.layer.encoder, call, grid, use, stream_of(target));
    else
      launch<Fp16>(side.format, params.layer.encoder, call, grid, use, stream_of(target));
  };
  return launch_layers(params, target, call_of(params, side), side.first_side == 0, run);
}

bool is_tuned_dim(int dim) { return dim >= 32 && dim <= 512 && std::has_single_bit(unsigned(dim)); }

}  // namespace

// See kernels.h. Everything but the data is looked at.
Status supports_append_rows(const AppendParams& params) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  const PageLayout& page = layer.page;
  if (geometry.mla_row != MlaRow::kNone) return not_tuned("MLA rows have another kernel");
  if (!is_tuned_dim(geometry.k_dim) || !is_tuned_dim(geometry.v_dim))
    return not_tuned("dims are powers of two from 32 to 512");
  if (params.rope.dim % 32 != 0) return not_tuned("rope.dim is a multiple of 32");
  if (page.page_bytes > int64_t{1} << 31) return not_tuned("pages are at most 2 GiB");
  if (page.k_data_offset_bytes % 16 != 0 || page.v_data_offset_bytes % 16 != 0)
    return not_tuned("data in pages begins at multiples of 16 bytes");
  return check_tuned_memory(params);
}

Status append_rows(const AppendParams& params, const Target& target) {
  if (params.num_slots == 0) return {};
  const AttentionGeometry& geometry = params.layer.geometry;
  const Launch keys = {0, is_alike(params) ? 2 : 1, geometry.k_format, params.k.dtype,
                       geometry.k_dim};
  if (Status status = launch_side(params, keys, target); !status.ok()) return status;
  if (is_alike(params)) return {};
  return launch_side(params, {1, 1, geometry.v_format, params.v.dtype, geometry.v_dim}, target);
}

}  // namespace larder::kernels::cuda
