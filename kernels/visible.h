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

// Row `row` of the q_len rows of a sequence stands at position seq_len - q_len + row, which is
// negative if there are more rows than tokens.
inline KeyRange visible_keys(bool causal, int32_t window_left, int64_t q_len, int64_t seq_len,
                             int64_t row) {
  const int64_t position = seq_len - q_len + row;
  KeyRange range = {0, causal ? std::max<int64_t>(position + 1, 0) : seq_len};
  if (window_left >= 0) range.begin = std::max<int64_t>(position - window_left, 0);
  return range;
}

// What causality and the window leave of the row's keys. A mask replaces causality and may hide
// any of these keys: see mask_bits.
inline KeyRange visible_keys(const AttendParams& params, int64_t sequence, int64_t row) {
  return visible_keys(params.causal && params.mask == nullptr, params.window_left,
                      params.q_lens[sequence], params.seq_lens[sequence], row);
}

// Keys that at least one row of the sequence may see. A mask is not looked at: the blocks of keys
// that it hides from every row must be there as those of any other.
inline KeyRange touched_keys(const AttendParams& params, int64_t sequence) {
  if (params.q_lens[sequence] == 0) return {};
  return {visible_keys(params, sequence, 0).begin, params.seq_lens[sequence]};
}

// The mask's bits of up to 64 keys [begin, end) of a row: bit i is key begin + i. The call has a
// mask.
inline uint64_t mask_bits(const AttendParams& params, int64_t sequence, int64_t row, int64_t begin,
                          int64_t end) {
  const uint8_t* bytes = params.mask + params.mask_offsets[sequence];
  const int64_t first = row * params.seq_lens[sequence] + begin;
  const int64_t last = first + (end - begin) - 1;
  uint64_t bits = 0;
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
