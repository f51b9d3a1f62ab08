#include "tests/bench/attend_call.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <numeric>

#include "tests/bench/ceilings.h"
#include "tests/support/dense_attention.h"
#include "tests/support/nvfp4_pool.h"

namespace larder::test {
namespace {

constexpr int64_t kTouchedBytes = 400'000'000;
constexpr float kKScale = 0.75f;
constexpr float kVScale = 1.25f;

std::vector<uint16_t> halves(const DeviceMemory& memory, int64_t first, int64_t count) {
  const auto bytes = to_host(memory.data() + 2 * first, 2 * count);
  std::vector<uint16_t> result(static_cast<size_t>(count));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

std::vector<float> floats(const DeviceMemory& memory, int64_t first, int64_t count) {
  const auto bytes = to_host(memory.data() + 4 * first, 4 * count);
  std::vector<float> result(static_cast<size_t>(count));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

double scale_of(const AttendCase& c) {
  return static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.dim)));
}

}  // namespace

AttendCall::AttendCall(const AttendCase& c, cudaStream_t stream)
    : case_(c), geometry_{1, c.kv_heads, c.block_tokens, c.dim, c.dim, c.format, c.format} {
  place_blocks();
  tables_.emplace(table_);
  pool_.emplace(num_blocks_ * page_layout(geometry_).page_bytes);
  q_.emplace(2 * sets_ * values_per_set());
  out_.emplace(2 * sets_ * values_per_set());
  lse_.emplace(4 * sets_ * rows_per_set() * c.q_heads);
  seq_lens_.emplace(c.seq_lens);
  q_lens_.emplace(std::vector<int32_t>(c.seq_lens.size(), c.q_len));
  std::normal_distribution<float> normal;
  std::vector<float> offset(static_cast<size_t>(c.kv_heads) * static_cast<size_t>(c.dim));
  for (float& value : offset) value = normal(random_);
  key_offset_.emplace(offset);
  plan_.emplace(kAttendPlanBytes);
  launch_fill_pages(pool_->data(), num_blocks_, geometry_, 11, stream);
  launch_fill(q_->data(), q_->bytes(), Fill::kBf16, 12, stream);
  check(cudaGetLastError());
  check(cudaStreamSynchronize(stream));
  compute_expected();
}

int64_t AttendCall::first_token(int64_t sequence) const {
  if (case_.window_left < 0) return 0;
  const int32_t length = case_.seq_lens[static_cast<size_t>(sequence)];
  return std::max(length - case_.q_len - case_.window_left, 0);
}

// Blocks that no row sees are those of other sequences.
void AttendCall::place_blocks() {
  const int64_t tokens = case_.block_tokens;
  int64_t seen_tokens = case_.shared_tokens;
  int64_t seen_blocks = case_.shared_tokens / tokens;
  for (int64_t s = 0; s < num_seqs(); ++s) {
    const int64_t length = case_.seq_lens[static_cast<size_t>(s)];
    const int64_t first = std::max<int64_t>(first_token(s), case_.shared_tokens);
    const int64_t end = (length + tokens - 1) / tokens;
    seen_tokens += length - first;
    seen_blocks += end - first / tokens;
    table_stride_ = std::max(table_stride_, end);
  }
  kv_bytes_ = seen_tokens * page_layout(geometry_).page_bytes / tokens;
  // Two at least: else the end of one launch's data would be in the cache for the next.
  sets_ = std::max<int64_t>(kTouchedBytes / kv_bytes_ + 1, 2);
  num_blocks_ = std::max<int64_t>(sets_ * seen_blocks * 5 / 4, 1024);

  std::vector<int32_t> order(static_cast<size_t>(num_blocks_));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_);
  table_.assign(static_cast<size_t>(sets_ * num_seqs() * table_stride_), 0);
  auto next = order.begin();
  auto row = table_.begin();
  for (int64_t set = 0; set < sets_; ++set) {
    const auto shared = next;
    next += case_.shared_tokens / tokens;
    for (int64_t s = 0; s < num_seqs(); ++s, row += table_stride_) {
      const int64_t end = (case_.seq_lens[static_cast<size_t>(s)] + tokens - 1) / tokens;
      for (int64_t b = 0; b < end; ++b) {
        if (b < case_.shared_tokens / tokens)
          row[b] = shared[b];
        else if (b < first_token(s) / tokens)
          row[b] = order[static_cast<size_t>(b % num_blocks_)];
        else
          row[b] = *next++;
      }
    }
  }
}

kernels::AttendParams AttendCall::params(int64_t call) const {
  const int64_t set = call % sets_;
  kernels::AttendParams p;
  p.layer.base = pool_->data();
  p.layer.geometry = geometry_;
  p.layer.page = page_layout(geometry_);
  p.layer.block_stride_bytes = p.layer.page.page_bytes;
  p.layer.num_blocks = num_blocks_;
  p.layer.key_transform = case_.key_transform;
  if (is_centred(case_.key_transform)) p.layer.key_offset = key_offset_->as<float>();
  p.layer.k_scale = kKScale;
  p.layer.v_scale = kVScale;
  const int64_t values = set * values_per_set();
  p.q = dense_tensor(q_->as<uint16_t>() + values, Dtype::kBf16, rows_per_set(), case_.q_heads,
                     case_.dim);
  p.output.out = dense_tensor(out_->as<uint16_t>() + values, Dtype::kFp16, rows_per_set(),
                              case_.q_heads, case_.dim);
  p.output.lse = lse_->as<float>() + set * rows_per_set() * case_.q_heads;
  p.q_lens = q_lens_->as<int32_t>();
  p.seq_lens = seq_lens_->as<int32_t>();
  p.block_table = tables_->as<int32_t>() + set * num_seqs() * table_stride_;
  p.num_seqs = num_seqs();
  p.block_table_stride = table_stride_;
  p.scale = static_cast<float>(scale_of(case_));
  p.window_left = case_.window_left;
  p.deterministic = case_.deterministic;
  p.shared_prefix_tokens = case_.shared_prefix_tokens;
  if (case_.shares_plan) p.plan = {plan_->data(), call % kLayers == 0};
  return p;
}

void AttendCall::poison() {
  check(cudaMemset(out_->data(), 0xFF, static_cast<size_t>(out_->bytes())));
  check(cudaMemset(lse_->data(), 0xFF, static_cast<size_t>(lse_->bytes())));
  check(cudaDeviceSynchronize());
}

// Rotated keys are met by rotated queries, and what centring took from a row's logits is one
// number, which changes its LSE alone.
AttendCall::Expected AttendCall::expect(int64_t set, int64_t sequence, int32_t kv_head) const {
  const int64_t length = case_.seq_lens[static_cast<size_t>(sequence)];
  const int64_t page_bytes = page_layout(geometry_).page_bytes;
  const int64_t blocks = (length + case_.block_tokens - 1) / case_.block_tokens;
  const int32_t* row = &table_[static_cast<size_t>((set * num_seqs() + sequence) * table_stride_)];
  Pool pool(geometry_, blocks);
  pool.layer().k_scale = kKScale;
  pool.layer().v_scale = kVScale;
  for (int64_t b = 0; b < blocks; ++b)
    check(cudaMemcpy(pool.bytes().data() + b * page_bytes, pool_->data() + row[b] * page_bytes,
                     static_cast<size_t>(page_bytes), cudaMemcpyDeviceToHost));

  DenseAttention call;
  call.q_len = case_.q_len;
  call.seq_len = length;
  call.num_kv_heads = 1;
  call.k_dim = call.v_dim = case_.dim;
  call.scale = scale_of(case_);
  call.window_left = case_.window_left;
  for (int64_t token = 0; token < length; ++token) {
    const auto k = pool.read(Side::kK, token, kv_head);
    const auto v = pool.read(Side::kV, token, kv_head);
    call.k.insert(call.k.end(), k.begin(), k.end());
    call.v.insert(call.v.end(), v.begin(), v.end());
  }

  Expected expected = {set, sequence, {}, {}, {}};
  const int32_t group = case_.q_heads / case_.kv_heads;
  expected.heads = {int64_t{kv_head} * group};
  if (group > 1) expected.heads.push_back(int64_t{kv_head} * group + group - 1);
  call.num_q_heads = std::ssize(expected.heads);
  const auto offset = floats(*key_offset_, int64_t{kv_head} * case_.dim, case_.dim);
  std::vector<double> taken;  // from every logit of a row and head
  for (int64_t i = 0; i < case_.q_len; ++i)
    for (const int64_t head : expected.heads) {
      const int64_t q_row = set * rows_per_set() + sequence * case_.q_len + i;
      std::vector<double> q;
      for (const uint16_t bits : halves(*q_, (q_row * case_.q_heads + head) * case_.dim, case_.dim))
        q.push_back(bf16_value(bits));
      taken.push_back(!is_centred(case_.key_transform)
                          ? 0.0
                          : call.scale *
                                std::inner_product(q.begin(), q.end(), offset.begin(), 0.0));
      if (is_rotated(case_.key_transform)) q = hadamard(q, rotation_dim(case_.dim));
      call.q.insert(call.q.end(), q.begin(), q.end());
    }
  DenseResult result = dense_attention(call);
  expected.out = std::move(result.out);
  expected.lse = std::move(result.lse);
  for (size_t i = 0; i < taken.size(); ++i) expected.lse[i] += taken[i];
  return expected;
}

void AttendCall::compute_expected() {
  const auto any = std::uniform_int_distribution<int64_t>(0, num_seqs() - 1)(random_);
  std::vector<std::future<Expected>> parts;
  const auto start = [&](int64_t set, int64_t sequence) {
    std::vector<int32_t> kv_heads = {0};
    if (case_.kv_heads > 1) kv_heads.push_back(case_.kv_heads - 1);
    for (const int32_t kv_head : kv_heads)
      parts.push_back(
          std::async(std::launch::async, [=, this] { return expect(set, sequence, kv_head); }));
  };
  start(0, 0);
  if (num_seqs() > 1) start(0, num_seqs() - 1);
  start(sets_ - 1, any);
  for (auto& part : parts) expected_.push_back(part.get());
}

AttendErrors AttendCall::errors() const {
  AttendErrors errors;
  const int64_t num_heads = case_.q_heads;
  const auto out = halves(*out_, 0, sets_ * values_per_set());
  const auto lse = floats(*lse_, 0, sets_ * rows_per_set() * num_heads);
  errors.not_finite =
      std::count_if(out.begin(), out.end(), [](uint16_t h) { return (h & 0x7C00) == 0x7C00; }) +
      std::count_if(lse.begin(), lse.end(), [](float x) { return !std::isfinite(x); });
  std::vector<double> actual, expected;
  for (const Expected& part : expected_) {
    const int64_t first_row = part.set * rows_per_set() + part.sequence * case_.q_len;
    size_t index = 0;
    for (int64_t row = first_row; row < first_row + case_.q_len; ++row)
      for (const int64_t head : part.heads) {
        const auto at = static_cast<size_t>(row * num_heads + head);
        const double error = std::fabs(lse[at] - part.lse[index++]);
        // A NaN stays.
        if (!(error <= errors.max_lse_error)) errors.max_lse_error = error;
        for (size_t d = 0; d < static_cast<size_t>(case_.dim); ++d)
          actual.push_back(fp16_value(out[at * static_cast<size_t>(case_.dim) + d]));
      }
    expected.insert(expected.end(), part.out.begin(), part.out.end());
  }
  errors.rel_l2 = relative_l2(actual, expected);
  return errors;
}

}  // namespace larder::test
