// The rows of one forward pass: tokens of one or more sequences, with the block tables that the
// pool needs to append and attend for all of them at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "larder/client.h"

namespace larder::examples {

class Batch {
 public:
  // Makes room in the sequence for `tokens` and adds them as its next rows; a sequence is added at
  // most once. A refusal of the pool leaves the batch as it was.
  Status add(Sequence& sequence, std::span<const int32_t> tokens);

  bool empty() const { return tokens_.empty(); }
  int64_t num_rows() const { return static_cast<int64_t>(tokens_.size()); }
  std::span<const int32_t> tokens() const { return tokens_; }        // [num_rows]
  std::span<const int32_t> positions() const { return positions_; }  // [num_rows]
  std::span<const int64_t> slots() const { return slots_; }          // [num_rows]
  std::span<const int32_t> last_rows() const { return last_rows_; }  // [num_seqs]
  int64_t num_seqs() const { return static_cast<int64_t>(q_lens_.size()); }
  std::span<const int32_t> q_lens() const { return q_lens_; }      // [num_seqs]
  std::span<const int32_t> seq_lens() const { return seq_lens_; }  // [num_seqs], the rows included
  int64_t most_blocks() const;                                     // of one sequence
  // The block table [num_seqs, stride], padded with -1; stride is at least most_blocks().
  void write_block_table(std::span<int32_t> table, int64_t stride) const;

  // What Pool::attend takes, for these q rows. Points into this batch.
  AttendBatch attend_batch(const TensorView& q, const TensorView& out);

 private:
  std::vector<int32_t> tokens_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> last_rows_;
  std::vector<int32_t> q_lens_;
  std::vector<int32_t> seq_lens_;
  std::vector<std::vector<int32_t>> block_ids_;  // one row per sequence, of its own length
  std::vector<int32_t> block_table_;             // as written; made when needed
  int64_t block_table_stride_ = 0;
};

}  // namespace larder::examples
