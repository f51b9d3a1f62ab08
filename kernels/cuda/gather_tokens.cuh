// Which tokens the output rows of a CTA hold: each row is looked up by a thread of its own, so that
// rows of slots, of small blocks and of many short sequences are all alike.
#pragma once

#include <cstdint>

#include "kernels/cuda/gather_call.cuh"

namespace larder::kernels::cuda {

inline constexpr int kMinRowsLog2 = 4;
inline constexpr int kMaxRowsLog2 = 6;
inline constexpr int kMaxRows = 1 << kMaxRowsLog2;  // of a CTA at once
inline constexpr int kReporters = kMaxRows;         // the first of the threads that look at lengths
static_assert(kMaxRows == 2 * kWarp);

// Above this, reading all lengths in every CTA would cost more than the rows.
inline constexpr int64_t kMaxPackedSequences = 4096;

// Tokens of a packed sequence that fall into the rows of a CTA.
struct PackedTokens {
  int64_t sequence;
  int64_t first;  // its first token kept
  int64_t start;  // the row of that
  int64_t end;    // behind its last row
};

struct PackedRows {
  int64_t strip_tokens[kWarp];    // per warp
  PackedTokens of_row[kMaxRows];  // where `begins`
  uint8_t begins[kMaxRows];       // whether tokens of another sequence begin with the row
};

// One thread. `position` and `first`, the first token kept, are positions in the sequence. The
// entry is read before it is known whether the token is kept, so that it and the length are on
// their way together. A block is reported by the row of its first token that is kept.
__device__ inline GatherRun run_of_token(const GatherCall& call, PointOfUse use, int64_t sequence,
                                         int64_t position, int64_t first, bool is_kept,
                                         int64_t row) {
  if (position >= call.table_tokens) return {};
  const uint32_t at = static_cast<uint32_t>(position);
  const uint32_t entry = at / static_cast<uint32_t>(call.block_tokens);
  const int token = static_cast<int>(at - entry * static_cast<uint32_t>(call.block_tokens));
  const int64_t block =
      call.block_table == nullptr
          ? -1
          : load_once(call.block_table + sequence * call.block_table_stride + entry);
  if (!is_kept) return {};
  if (token != 0 && position != first) use.faults = nullptr;
  if (!use.may_use(block, call.num_blocks, false, block)) return {};
  return {call.base + block * call.block_stride_bytes, row, token, 1};
}

__device__ inline int64_t quotient(int64_t value, int64_t divisor) {
  if (((value | divisor) >> 32) == 0)
    return static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor);
  return value / divisor;
}

// Sequences with windows of rows_per_sequence rows. The first threads have a row each, those from
// kReporters on a length to look at.
__device__ inline GatherRun find_window_row(const GatherCall& call, const PointOfUse& use,
                                            int64_t first_row, int num_rows) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < num_rows) {
    const int64_t row = first_row + thread;
    const int64_t sequence = quotient(row, call.rows_per_sequence);
    if (row >= call.out_rows || sequence >= call.num_seqs) return {};
    const int64_t offset = row - sequence * call.rows_per_sequence;
    const NamedSequence named = named_sequence(call, sequence);
    const KeptTokens kept = kept_tokens(call, named);
    const int64_t first = call.first_tokens == nullptr ? 0 : kept.first;
    return run_of_token(call, use, sequence, first + offset, first, offset < kept.count, row);
  }
  const int64_t sequence = first_row + thread - kReporters;
  if (use.faults != nullptr && thread >= kReporters && thread < kReporters + num_rows &&
      sequence < call.num_seqs)
    report_cuts(call, use, named_sequence(call, sequence), sequence * call.rows_per_sequence);
  return {};
}

// All threads. What this thread's figure and those of the threads before it add up to, less its
// own.
__device__ inline int64_t sum_before(int64_t figure, int64_t* warp_sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int64_t total = figure;
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const int64_t other = __shfl_up_sync(0xFFFFFFFFu, total, apart);
    if (lane >= apart) total += other;
  }
  if (lane == kWarp - 1) warp_sums[warp] = total;
  __syncthreads();
  int64_t before = total - figure;
  for (int i = 0; i < warp; ++i) before += warp_sums[i];
  return before;
}

// Sequences without gaps between them: every thread has a strip of them, and names those whose
// tokens fall into the rows, at the first row of each. The first CTA looks at all lengths.
__device__ inline void name_packed_rows(const GatherCall& call, const PointOfUse& use,
                                        int64_t first_row, int num_rows, PackedRows& rows) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kMaxRows) rows.begins[thread] = 0;
  const int num_seqs = static_cast<int>(call.num_seqs);
  const int num_threads = static_cast<int>(blockDim.x);
  const int strip = (num_seqs + num_threads - 1) / num_threads;
  const int begin = min(thread * strip, num_seqs);
  const int end = min(begin + strip, num_seqs);
  int64_t tokens = 0;
  for (int s = begin; s < end; ++s) tokens += kept_tokens(call, named_sequence(call, s)).count;
  int64_t start = sum_before(tokens, rows.strip_tokens);
  const bool reports = first_row == 0 && use.faults != nullptr;
  const int64_t last_row = min(first_row + num_rows, call.out_rows);
  if (!reports && (start >= last_row || start + tokens <= first_row)) return;
  for (int s = begin; s < end; ++s) {
    const NamedSequence named = named_sequence(call, s);
    const KeptTokens kept = kept_tokens(call, named);
    if (reports) report_cuts(call, use, named, start);
    const int64_t row = max(start, first_row);
    if (row < min(start + kept.count, last_row)) {
      rows.begins[row - first_row] = 1;
      rows.of_row[row - first_row] = {s, kept.first, start, start + kept.count};
    }
    start += kept.count;
  }
}

// Lengths may change between two looks at them, hence the checks of what another thread has named.
__device__ inline GatherRun find_packed_row(const GatherCall& call, const PointOfUse& use,
                                            int64_t first_row, int num_rows, PackedRows& rows) {
  name_packed_rows(call, use, first_row, num_rows, rows);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= kMaxRows) return {};
  const int lane = thread % kWarp;
  const uint64_t low = __ballot_sync(0xFFFFFFFFu, rows.begins[lane] != 0);
  const uint64_t high = __ballot_sync(0xFFFFFFFFu, rows.begins[lane + kWarp] != 0);
  const uint64_t begins = (low | high << kWarp) & (~uint64_t{0} >> (kMaxRows - 1 - thread));
  const int64_t row = first_row + thread;
  if (thread >= num_rows || row >= call.out_rows || begins == 0) return {};
  const PackedTokens tokens = rows.of_row[kMaxRows - 1 - __clzll(static_cast<int64_t>(begins))];
  if (row >= tokens.end) return {};
  return run_of_token(call, use, tokens.sequence, tokens.first + row - tokens.start, tokens.first,
                      true, row);
}

// All threads of the CTA, which are more than kMaxRows + `num_rows` and at most 1024: thread i is
// given row first_row + i.
__device__ inline GatherRun find_row(const GatherCall& call, const PointOfUse& use,
                                     int64_t first_row, int num_rows, PackedRows& rows) {
  if (call.slots != nullptr) {
    const int64_t i = first_row + threadIdx.x;
    return static_cast<int>(threadIdx.x) < num_rows && i < call.num_slots
               ? run_of_slot(call, use, i)
               : GatherRun{};
  }
  return call.rows_per_sequence > 0 ? find_window_row(call, use, first_row, num_rows)
                                    : find_packed_row(call, use, first_row, num_rows, rows);
}

// A single sequence needs no sum over lengths: it is a window of all rows that it may have.
inline void set_single_window(GatherCall& call) {
  if (call.slots != nullptr || call.rows_per_sequence > 0 || call.num_seqs != 1) return;
  call.rows_per_sequence = call.window = std::min(call.table_tokens, call.out_rows);
}

// CTAs' worth of rows. Every length is looked at by one of them, and the outputs may have fewer
// rows than there are windows.
inline int64_t num_row_groups(const GatherCall& call, int rows_log2) {
  const auto groups = [rows_log2](int64_t rows) {
    return (rows >> rows_log2) + ((rows & ((int64_t{1} << rows_log2) - 1)) != 0);
  };
  if (call.slots != nullptr) return groups(call.num_slots);
  // Packed: num_seqs is at most kMaxPackedSequences, so the product fits. Windows are validated.
  const bool is_packed = call.rows_per_sequence == 0;
  const int64_t held = call.num_seqs * (is_packed ? call.table_tokens : call.rows_per_sequence);
  const int64_t written = groups(std::min(held, call.out_rows));
  return std::max(written, is_packed ? int64_t{1} : groups(call.num_seqs));
}

// The most rows per CTA, each of which has `num_parts`, that leave enough CTAs: a look-up takes two
// or three dependent reads, however many rows share it.
inline int rows_log2_of(const GatherCall& call, int64_t num_parts, int64_t enough_ctas) {
  int rows_log2 = kMaxRowsLog2;
  while (rows_log2 > kMinRowsLog2 && num_row_groups(call, rows_log2) * num_parts < enough_ctas)
    --rows_log2;
  return rows_log2;
}

}  // namespace larder::kernels::cuda
