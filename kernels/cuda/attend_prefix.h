// Keys that many sequences of a batch share at their head, attended once for all of their rows. The
// results are unnormalised states, which the kernel that takes the rest of each sequence's keys
// adds to its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector_types.h>

#include "kernels/cuda/attend_shared_plan.h"
#include "kernels/params.h"
#include "kernels/target.h"
#include "larder/status.h"

namespace larder::kernels::cuda {

// What the shapes of a call decide, so that a captured launch serves other lengths and tables. Each
// size is a multiple of 256.
struct PrefixLayout {
  bool is_used = false;  // false: the rest is 0, and attend_prefix must not be called
  int32_t num_splits = 0;
  int32_t tile_pairs = 0;  // of query pairs that a plan counts by
  int64_t kept_bytes = 0;  // of a plan, what calls can share
  int64_t plan_bytes = 0;
  int64_t states_bytes = 0;
  int64_t sums_bytes = 0;
  int64_t total_bytes = 0;
};

// Of a call that has passed validate_attend.
PrefixLayout prefix_layout(const AttendParams& params);

// In device memory. A logit here is that of the result times log2(e): with the cap, and with what
// centring took from the stored key.
struct PrefixView {
  // [num_seqs]: how many tokens at the head of the sequence are attended, a multiple of
  // block_tokens; 0: none, and then neither the states nor the sums of its rows are written. They
  // are there before the kernel that attends them begins; the rest is there once it has ended.
  const int32_t* tokens = nullptr;
  const uint64_t* key = nullptr;  // not nullptr: the tokens are those of a plan that was made
  uint64_t wanted_key = 0;        // before, and count only where it has this key
  // [num_splits, rows, heads]. x: a base, at most 8 below the greatest logit of the split's keys;
  // y: the sum of 2^(logit - x). Without a key, x is the lowest float, y and the sums are 0.
  const float2* states = nullptr;
  // [num_splits, rows, heads, v_dim]: sums of 2^(logit - x) * V, V with the scales of its groups
  // but without v_scale.
  const float* sums = nullptr;
  int64_t num_results = 0;  // rows * heads
  int32_t num_splits = 0;
};

// One to three launches; one where a plan is taken. `workspace` has layout.total_bytes,
// 256-byte aligned. Tokens of blocks that may not be used are left out and reported as faults;
// lengths that do not fit are cut without a report.
//
// The last launch lets the kernel after it start once all kernels before it have ended and what
// they wrote is there: such a kernel has to wait for states and sums alone.
//
// `shared`, where it has memory, has layout.kept_bytes from prefix_at on. A call that makes the
// plan writes there and takes the key away; the kernel that takes the rest of the keys writes the
// key once that has ended, with its own part of the plan. A call that takes the plan looks at the
// key: where it is another one, no token counts as attended.
Status attend_prefix(const AttendParams& params, const Target& target, const PrefixLayout& layout,
                     std::byte* workspace, const SharedPlan& shared, PrefixView* view);

}  // namespace larder::kernels::cuda
