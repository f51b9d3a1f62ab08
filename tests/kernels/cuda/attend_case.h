// An attend call with all its arrays, run on the CPU and on a GPU from the same bytes.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/kernels/cuda/every_row.h"
#include "tests/kernels/cuda/outputs.h"
#include "tests/kernels/cuda/stored_rows.h"

namespace larder::test {

struct Lengths {
  int32_t q_len;
  int32_t seq_len;
};

// The row that is tuned for decoding. It rounds weights and rotated queries to half precision.
inline constexpr std::string_view kTunedAttend = "cuda_attend_decode";

inline bool has_attend_row(std::string_view name) {
  const auto rows = kernels::attend_kernels();
  return std::any_of(rows.begin(), rows.end(), [&](const auto& row) { return row.name == name; });
}

class AttendCase {
 public:
  // Blocks in shuffled order; keys and values around 1 in size; NaN bytes in every block that no
  // table names and past the end of sequences; garbage in the table past their blocks.
  AttendCase(const AttentionGeometry& geometry, int64_t heads, const std::vector<Lengths>& lengths,
             std::mt19937_64& engine, int64_t odd_bytes = 0, const ContextShard& shard = {})
      : num_q_heads(heads), odd_bytes_(odd_bytes) {
    params.shard = shard;
    params.layer.geometry = geometry;
    params.layer.page = page_layout(geometry);
    params.layer.block_stride_bytes = params.layer.page.page_bytes + odd_bytes;
    params.layer.k_scale = 0.5f;
    params.layer.v_scale = 2.0f;
    int64_t num_blocks = 2;
    for (const Lengths& one : lengths) {
      q_lens.push_back(one.q_len);
      seq_lens.push_back(one.seq_len);
      num_rows += one.q_len;
      num_blocks += blocks_of(one.seq_len);
      params.block_table_stride = std::max(params.block_table_stride, blocks_of(one.seq_len) + 2);
    }
    params.layer.num_blocks = num_blocks;
    params.scale = 1.0f / std::sqrt(static_cast<float>(geometry.k_dim));
    pool.assign(static_cast<size_t>(num_blocks * params.layer.block_stride_bytes + odd_bytes),
                std::byte{0xFF});
    fill_table(engine);
    fill_pool(engine);
    set_queries(Dtype::kBf16, Layout::kDense, engine);
  }

  // Of the tokens of a sequence, those of the shard.
  int64_t blocks_of(int64_t tokens) const {
    const int64_t block_tokens = params.layer.geometry.block_tokens;
    return (local_tokens(params.shard, tokens) + block_tokens - 1) / block_tokens;
  }

  void set_queries(Dtype dtype, Layout layout, std::mt19937_64& engine) {
    q_view = view_of(nullptr, dtype, layout, num_rows, num_q_heads, params.layer.geometry.k_dim);
    q.assign(view_bytes(q_view), std::byte{0xFF});
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t head = 0; head < num_q_heads; ++head)
        for (int64_t i = 0; i < q_view.shape[2]; ++i)
          put_value(q, dtype,
                    row * q_view.strides[0] + head * q_view.strides[1] + i * q_view.strides[2],
                    normal(engine));
  }
  void set_sinks(std::mt19937_64& engine) { sinks = normals(num_q_heads, engine); }
  void set_alibi(std::mt19937_64& engine) {
    alibi_slopes = normals(num_q_heads, engine);
    for (float& slope : alibi_slopes) slope = std::fabs(slope) / 8;
  }
  void set_transform(KeyTransform transform, std::mt19937_64& engine) {
    const AttentionGeometry& g = params.layer.geometry;
    params.layer.key_transform = transform;
    key_offset = is_centred(transform) ? normals(int64_t{g.num_kv_heads} * g.k_dim, engine)
                                       : std::vector<float>();
  }
  // sees(sequence, row, key)
  template <typename Sees>
  void set_mask(const Sees& sees) {
    mask.assign(1, 0xFF);  // no sequence begins at the first byte
    mask_offsets.clear();
    for (size_t s = 0; s < q_lens.size(); ++s) {
      mask_offsets.push_back(static_cast<int64_t>(mask.size()));
      const int64_t bits = int64_t{std::max(q_lens[s], 0)} * std::max(seq_lens[s], 0);
      mask.resize(mask.size() + static_cast<size_t>((bits + 7) / 8));
      for (int64_t bit = 0; bit < bits; ++bit)
        if (sees(static_cast<int64_t>(s), bit / seq_lens[s], bit % seq_lens[s]))
          mask[static_cast<size_t>(mask_offsets.back() + bit / 8)] |=
              static_cast<uint8_t>(1 << bit % 8);
    }
  }
  void set_random_mask(std::mt19937_64& engine) {
    set_mask([&](int64_t, int64_t, int64_t) { return engine() % 3 != 0; });
  }

  // What a sequence's key has of K and V.
  std::byte* block_bytes(size_t sequence, int64_t token) {
    return pool.data() + odd_bytes_ +
           table[sequence * static_cast<size_t>(params.block_table_stride) +
                 static_cast<size_t>(token / params.layer.geometry.block_tokens)] *
               params.layer.block_stride_bytes;
  }
  StoredBytes stored(size_t sequence, int64_t token, int64_t kv_head, bool is_key) {
    return stored_bytes(
        params.layer, block_bytes(sequence, token),
        kv_head * params.layer.geometry.block_tokens + token % params.layer.geometry.block_tokens,
        is_key);
  }

  kernels::AttentionOutput output() const {
    return output_of(spec, num_rows, num_q_heads, params.layer.geometry.v_dim);
  }

  // The call, with what `place` makes of each array.
  template <typename Place>
  kernels::AttendParams call(Place&& place) {
    kernels::AttendParams made = params;
    made.layer.base = place(pool) + odd_bytes_;
    made.layer.key_offset = place(key_offset);
    made.q = q_view;
    made.q.data = place(q);
    made.output = output();
    made.q_lens = place(q_lens);
    made.seq_lens = place(seq_lens);
    made.num_seqs = static_cast<int64_t>(q_lens.size());
    made.block_table = place(table);
    made.sinks = place(sinks);
    made.alibi_slopes = place(alibi_slopes);
    made.mask = place(mask);
    made.mask_offsets = place(mask_offsets);
    made.mask_bytes = static_cast<int64_t>(mask.size());
    return made;
  }

  Outputs run_cpu() {
    Outputs host = poisoned(output(), spec.wants_lse);
    kernels::AttendParams made =
        call([](auto& values) { return values.empty() ? nullptr : values.data(); });
    made.shared_prefix_tokens = 0;  // what makes reading cheaper changes no result
    point_to(made.output, host.out.data(), host.lse.empty() ? nullptr : host.lse.data(),
             host.sf.empty() ? nullptr : host.sf.data());
    const Status status = kernels::run_attend(made);
    INFO(describe());
    CHECK_MESSAGE(status.ok(), status.to_string());
    return host;
  }

  struct CudaRun {
    std::string_view row;
    Outputs outputs;
    uint32_t fault_count = 0;
  };
  using Adjust = std::function<void(kernels::AttendParams&)>;
  // On every CUDA row that takes the call, each with poisoned outputs and workspace of its own.
  // `adjust` changes the call once its pointers are set.
  std::vector<CudaRun> run_cuda(const kernels::BlockRights* rights = nullptr,
                                const Adjust& adjust = nullptr) {
    INFO(describe());
    Uploads uploads;
    const kernels::AttendParams uploaded = call(uploads);
    std::optional<DeviceOutputs> device;
    kernels::Target target;
    target.backend = kernels::Backend::kCuda;
    target.rights = rights;
    std::vector<CudaRun> runs;
    const auto names = on_every_row<kernels::AttendParams>(
        kernels::attend_kernels(), target,
        [&] {
          device.emplace(poisoned(output(), spec.wants_lse));
          target.faults = device->faults.data<kernels::CallFaults>();
          kernels::AttendParams made = uploaded;
          device->point(made.output);
          if (adjust) adjust(made);
          check_ok(kernels::validate_attend(made, kernels::Tables::kDevice));
          return made;
        },
        [&] {
          runs.push_back({"", device->read(), device->fault_count()});
        });
    for (size_t i = 0; i < runs.size(); ++i) runs[i].row = names[i];
    uploads.check_guards();
    return runs;
  }

  // The portable row is float32 but for rounding of the result. The tuned row: rel-L2 1e-3, since
  // an error of 2^-12 in each weight stays one in their sum, and of the LSE 1e-4 and 1e-4 of its
  // size. A rotated query rounded to 11 bits shifts each logit by about 2e-4 |q| |k| scale /
  // sqrt(k_dim), which is 2e-4 scale sqrt(k_dim) here, where elements are about 1 in size; rows
  // with one key show it in the LSE, so that five times as much is allowed.
  Tolerance tolerance(std::string_view row) const {
    if (row != kTunedAttend) return {};
    const bool is_rounded = is_rotated(params.layer.key_transform);
    const auto k_dim = static_cast<float>(params.layer.geometry.k_dim);
    const double logits = std::max(1.0f, params.scale * std::sqrt(k_dim));
    const double lse = is_rounded ? 1e-3 * logits : 1e-4;
    return {1e-3, spec.lse_form.base2 ? 1.45 * lse : lse, 1e-4};
  }
  void compare(const CudaRun& run, const Outputs& expected, const std::string& what) const {
    compare_outputs(output(), expected, run.outputs,
                    std::string(run.row) + ", " + what + ": " + describe(), tolerance(run.row));
  }
  void compare(const std::vector<CudaRun>& runs, const Outputs& expected,
               const std::string& what) const {
    for (const CudaRun& run : runs) compare(run, expected, what);
  }

  // On the CPU and all CUDA rows, without faults. Returns what the latter gave.
  std::vector<CudaRun> check(const std::string& what) { return check(what, run_cpu()); }
  std::vector<CudaRun> check(const std::string& what, const Outputs& expected) {
    std::vector<CudaRun> runs = run_cuda();
    for (const CudaRun& run : runs) {
      compare(run, expected, what);
      INFO(run.row << ", " << what << ": " << describe());
      CHECK(run.fault_count == 0);
    }
    return runs;
  }
  // The same for a call that the tuned row takes, where there is one. It leaves rotated keys in
  // bf16 to the portable row: a rotated query has more bits than bf16.
  std::vector<CudaRun> check_tuned(const std::string& what) { return check_tuned(what, run_cpu()); }
  std::vector<CudaRun> check_tuned(const std::string& what, const Outputs& expected) {
    std::vector<CudaRun> runs = check(what, expected);
    const bool is_taken = std::any_of(runs.begin(), runs.end(),
                                      [](const CudaRun& run) { return run.row == kTunedAttend; });
    const kernels::LayerView& layer = params.layer;
    const bool is_left =
        is_rotated(layer.key_transform) && layer.geometry.k_format == KvFormat::kBf16;
    INFO("taken by " << kTunedAttend << ": " << is_taken << ", " << what << ": " << describe());
    if (has_attend_row(kTunedAttend) && num_rows > 0) CHECK(is_taken == !is_left);
    return runs;
  }

  std::string describe() const {
    const AttentionGeometry& g = params.layer.geometry;
    std::ostringstream text;
    text << "attend " << name(g.mla_row) << ' ' << name(g.k_format) << '/' << name(g.v_format)
         << " dims " << g.k_dim << '/' << g.v_dim << " heads " << num_q_heads << '/'
         << g.num_kv_heads << " block " << g.block_tokens << " rows " << num_rows << " q "
         << name(q_view.dtype) << " out " << name(spec.dtype) << " layout "
         << static_cast<int>(spec.layout) << " lse " << spec.lse_form.base2
         << spec.lse_form.includes_sink << spec.lse_form.heads_first << " causal " << params.causal
         << " window " << params.window_left << " cap " << params.soft_cap << " sinks "
         << !sinks.empty() << " alibi " << !alibi_slopes.empty() << " mask " << !mask.empty()
         << " partial " << params.partial << " splits " << params.num_splits << " deterministic "
         << params.deterministic << " prefix " << params.shared_prefix_tokens << " shard "
         << params.shard.num_ranks << '/' << params.shard.rank << '/' << params.shard.interleave
         << " transform " << name(params.layer.key_transform) << " scale " << params.scale
         << " sequences " << q_lens.size() << " lengths";
    for (size_t s = 0; s < std::min<size_t>(q_lens.size(), 9); ++s)
      text << ' ' << q_lens[s] << ':' << seq_lens[s];
    return text.str();
  }

  kernels::AttendParams params;  // scalars; pointers are set by call()
  int64_t num_rows = 0;
  int64_t num_q_heads;
  OutputSpec spec;
  TensorView q_view;
  std::vector<std::byte> pool, q;
  std::vector<int32_t> q_lens, seq_lens, table;
  std::vector<float> sinks, alibi_slopes, key_offset;
  std::vector<uint8_t> mask;
  std::vector<int64_t> mask_offsets;

 private:
  void fill_table(std::mt19937_64& engine) {
    const int32_t garbage[] = {2147483647, -1, static_cast<int32_t>(0xDEADBEEF)};
    std::vector<int32_t> ids(static_cast<size_t>(params.layer.num_blocks - 2));
    std::iota(ids.begin(), ids.end(), 1);
    std::shuffle(ids.begin(), ids.end(), engine);
    for (const int32_t seq_len : seq_lens)
      for (int64_t i = 0; i < params.block_table_stride; ++i) {
        const bool is_used = i < blocks_of(seq_len);
        table.push_back(is_used ? ids.back() : garbage[engine() % 3]);
        if (is_used) ids.pop_back();
      }
  }
  void fill_pool(std::mt19937_64& engine) {
    const AttentionGeometry& g = params.layer.geometry;
    for (size_t s = 0; s < seq_lens.size(); ++s)
      for (int64_t token = 0; token < local_tokens(params.shard, seq_lens[s]); ++token)
        for (int64_t head = 0; head < g.num_kv_heads; ++head) {
          fill_row(stored(s, token, head, true), engine);
          if (g.mla_row == MlaRow::kNone) fill_row(stored(s, token, head, false), engine);
        }
  }

  int64_t odd_bytes_;  // the pool begins so many bytes past an aligned address
};

}  // namespace larder::test
