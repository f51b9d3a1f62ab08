// A call of tuned decode attention as far as it decides who takes which tiles; what has to be taken
// of it, worked out row by row in 64 bits, apart from the code under test; and the books over what
// has been taken.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "larder/context_shard.h"

namespace larder::test {

// What is wrong with a plan.
struct PlanError {
  std::string what;
};

template <typename... Values>
void expect(bool holds, std::string_view what, const Values&... values) {
  if (holds) return;
  std::ostringstream text;
  text << what;
  ((text << ' ' << values), ...);
  throw PlanError{text.str()};
}

struct PlanCase {
  std::vector<int32_t> q_lens;
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> prefix_tokens;  // empty: no prefix has been attended
  std::vector<int64_t> mask_offsets;   // empty: no mask
  int64_t mask_bytes = 0;
  int32_t num_rows = 0;  // of q
  int32_t num_kv_heads = 1;
  int32_t group = 1;
  int32_t block_tokens = 16;
  int64_t block_table_stride = 1;
  int32_t max_tokens = 0;  // of a row of the block table
  ContextShard shard;
  int32_t window_left = -1;
  bool is_causal = true;
  int32_t piece_tiles = 0;
  int32_t max_pieces = 1;
  int32_t begin_tiles = 0;
  int32_t num_segments = 0;  // as the host counts them, with whole_ctas
  int32_t whole_ctas = 0;
  int columns = 8;
  int step_tiles = 1;
  int grid = 1;
  int warps = 1;  // of a CTA
  int64_t num_slots = 0;

  int32_t num_seqs() const { return static_cast<int32_t>(q_lens.size()); }
  std::string to_string() const;
};

// Keys [begin, end) of a sequence.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};

struct PlanSegment {
  int32_t sequence = 0;  // num_seqs: the rows that no sequence covers
  int32_t head = 0;
  int32_t column_tile = 0;
  int64_t first_row = 0;  // of the sequence, in q
  int64_t rows = 0;       // of the sequence
  int64_t first_tile = 0;
  int64_t tiles = 0;
  KeyRange seen;   // what some row sees; empty: none sees anything
  KeyRange whole;  // what all rows see, as far as causality and the window go
};

struct PlanModel {
  std::vector<PlanSegment> segments;  // in the order in which they are dealt out
  std::vector<int64_t> reports;       // values that are wrong
  int64_t num_units = 0;

  // Index of a segment that there must be.
  int64_t find(int32_t sequence, int32_t head, int32_t column_tile) const;
};
PlanModel model_of(const PlanCase& one);

// Tiles [from, from + count) of a segment, counted from its first.
struct PlanPart {
  int64_t segment = 0;
  int64_t from = 0;
  int64_t count = 0;
};

// What a warp has of a segment that begins or ends elsewhere.
struct KeptPiece {
  int64_t number = 0;  // of the segment: pieces with the same are put together
  bool begins = false;
  bool ends = false;
  PlanPart part;
};

// What CTAs have done, which come one after the other in the order of their numbers.
class PlanLedger {
 public:
  PlanLedger(const PlanCase& one, const PlanModel& model);

  static constexpr int64_t kNone = -1;  // segment

  // The parts, all of one segment, make up its result.
  void finish(const std::vector<PlanPart>& parts);
  // What a CTA's warps have kept, in their order: results, or parts for slots, of which one is for
  // a segment's first part and one for others. Returns the segment that a CTA has the last part of
  // and others have the rest of. Empties `kept`.
  int64_t settle(std::span<std::optional<KeptPiece>> kept, int64_t other_slot, int64_t first_slot);
  // What lies in a slot that a CTA waits for: it has been written by this one or one before it.
  const std::vector<PlanPart>& take(int64_t slot);
  // Every segment has a result, and nothing was left for nobody.
  void check_complete() const;
  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }  // written

 private:
  struct Slot {
    std::vector<PlanPart> parts;
    bool is_taken = false;
  };
  void write(int64_t slot, const std::vector<PlanPart>& parts);

  const PlanModel& model_;
  int64_t most_slots_;
  std::map<int64_t, Slot> slots_;
  std::vector<bool> is_finished_;  // [segments]
};

}  // namespace larder::test
