// Which keys a query row sees: the one place where causality, the window and the mask are decided,
// and which entries of a sparse call count.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/params.h"

namespace larder::kernels {

// Keys [begin, end); empty if begin >= end.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const KeyRange&) const = default;
};

// The keys of a sequence that are in the cache: all of them, or those of the call's shard.
inline int64_t cached_keys(const AttendParams& params, int64_t sequence) {
  return local_tokens(params.shard, params.seq_lens[sequence]);
}

// What causality and the window leave of the row's keys, as their places in the cache. Row `row` of
// the q_len rows of a sequence stands at position seq_len - q_len + row, which is negative if there
// are more rows than tokens. A shard has every rank's tokens in their order, so that what a row
// sees of them is one range, too. A mask replaces causality and may hide any of these keys: see
// mask_bits.
inline KeyRange visible_keys(const AttendParams& params, int64_t sequence, int64_t row) {
  const int64_t position = int64_t{params.seq_lens[sequence]} - params.q_lens[sequence] + row;
  const auto cached_before = [&](int64_t token) {
    return local_tokens(params.shard, std::max<int64_t>(token, 0));
  };
  const bool is_causal = params.causal && params.mask == nullptr;
  KeyRange range = {0, is_causal ? cached_before(position + 1) : cached_keys(params, sequence)};
  if (params.window_left >= 0) range.begin = cached_before(position - params.window_left);
  return range;
}

// Keys that at least one row of the sequence may see. A mask is not looked at: the blocks of keys
// that it hides from every row must be there as those of any other.
inline KeyRange touched_keys(const AttendParams& params, int64_t sequence) {
  if (params.q_lens[sequence] == 0) return {};
  return {visible_keys(params, sequence, 0).begin, cached_keys(params, sequence)};
}

// The mask's bits of up to 64 keys [begin, end) of a row: bit i is key begin + i. The call has a
// mask.
inline uint64_t mask_bits(const AttendParams& params, int64_t sequence, int64_t row, int64_t begin,
                          int64_t end) {
  const uint8_t* bytes = params.mask + params.mask_offsets[sequence];
  const int64_t row_bits = row * params.seq_lens[sequence];
  uint64_t bits = 0;
  if (params.shard.num_ranks > 1) {  // the keys' bits are not next to each other
    for (int64_t key = begin; key < end; ++key) {
      const int64_t bit = row_bits + global_token(params.shard, key);
      bits |= uint64_t{bytes[bit / 8] >> bit % 8 & 1u} << (key - begin);
    }
    return bits;
  }
  const int64_t first = row_bits + begin;
  const int64_t last = first + (end - begin) - 1;
  for (int64_t byte = first / 8; byte <= last / 8; ++byte) {
    const int64_t shift = byte * 8 - first;
    const uint64_t value = bytes[byte];
    bits |= shift < 0 ? value >> -shift : value << shift;
  }
  return end - begin < 64 ? bits & ((uint64_t{1} << (end - begin)) - 1) : bits;
}

// The slot that an entry of a sparse call names, or -1 if the entry is ignored. The same slot
// counts as often as it is named.
inline int64_t sparse_mla_slot(const SparseMlaParams& params, int64_t row, int64_t entry) {
  if (params.topk_lens != nullptr && entry >= params.topk_lens[row]) return -1;
  const int64_t slot = params.indices[row * params.top_k + entry];
  const LayerView& layer = params.layer;
  return slot < layer.num_blocks * layer.geometry.block_tokens ? std::max<int64_t>(slot, -1) : -1;
}

}  // namespace larder::kernels
