// Calls of attention on a GPU for benchmarks: their memory, and what they should give.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/bench/gpu_timing.h"

namespace larder::test {

struct AttendCase {
  std::string group;  // cases of one group are compared: they take turns
  std::string shape;  // what the label calls seq_lens: "32x8K"
  std::vector<int32_t> seq_lens;
  KvFormat format = KvFormat::kNvfp4;
  int32_t q_heads = 32;
  int32_t kv_heads = 8;
  int32_t dim = 128;
  int32_t block_tokens = 16;
  int32_t q_len = 1;
  int32_t window_left = -1;
  KeyTransform key_transform = KeyTransform::kNone;
  bool deterministic = false;
  bool shares_plan = true;           // with the calls before it, as layers of a step do
  int32_t shared_tokens = 0;         // at the head of every sequence, in the same blocks
  int32_t shared_prefix_tokens = 0;  // what the call says of them
};

// "attend nvfp4 32/8 d128 b16 32x8K", then what is unusual about the case.
std::string label_of(const AttendCase& c);
json fields_of(const AttendCase& c);
// Every case of the benchmark; those of a group stand together.
std::vector<AttendCase> attend_cases();

struct AttendErrors {
  double rel_l2 = 0;         // over all outputs that are compared
  double max_lse_error = 0;  // absolute
  int64_t not_finite = 0;    // outputs and LSEs, all of them
  bool ok() const { return rel_l2 <= 1e-3 && max_lse_error <= 1e-4 && not_finite == 0; }
};

// A case as sets of sequences with blocks of their own, more than 400 MB of K and V in all, at
// random places of one pool. Every set has its own queries and outputs (fp16).
class AttendCall {
 public:
  AttendCall(const AttendCase& c, cudaStream_t stream);

  // Of the graph's call number `call`, on the next set. Every kLayers calls share a plan.
  kernels::AttendParams params(int64_t call) const;
  static constexpr int64_t kLayers = 32;
  int64_t sets() const { return sets_; }
  // Of the K and V that a call must read at least once, scales included.
  int64_t kv_bytes() const { return kv_bytes_; }
  // NaNs for all results.
  void poison();
  // The first, the last and a random sequence, two KV heads of each, against float64 on the
  // dequantised pool.
  AttendErrors errors() const;

 private:
  struct Expected {  // of the first and the last query head of a KV head
    int64_t set, sequence;
    std::vector<int64_t> heads;
    std::vector<double> out;  // [q_len, heads, dim]
    std::vector<double> lse;  // [q_len, heads]
  };

  void place_blocks();
  void compute_expected();
  Expected expect(int64_t set, int64_t sequence, int32_t kv_head) const;
  int64_t num_seqs() const { return std::ssize(case_.seq_lens); }
  int64_t rows_per_set() const { return num_seqs() * case_.q_len; }
  int64_t values_per_set() const { return rows_per_set() * case_.q_heads * case_.dim; }
  int64_t first_token(int64_t sequence) const;  // that some row sees

  AttendCase case_;
  AttentionGeometry geometry_;
  int64_t kv_bytes_ = 0;
  int64_t sets_ = 0;
  int64_t table_stride_ = 0;
  int64_t num_blocks_ = 0;
  std::vector<int32_t> table_;  // [sets, sequences, table_stride]
  std::mt19937 random_{20261202};
  // Made once the sizes above are known.
  std::optional<DeviceMemory> pool_, tables_, q_, out_, lse_, seq_lens_, q_lens_, key_offset_,
      plan_;
  std::vector<Expected> expected_;
};

}  // namespace larder::test
