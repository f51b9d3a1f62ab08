// attend on a GPU as decoding uses it: NaNs and infinities in the cache, and tables that are wrong.
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

// The largest magnitude of a result's row and head, NaN where it has one.
float row_size(const AttendCase& one, const Outputs& outputs, int64_t row, int64_t head) {
  const TensorView view = one.output().out;
  float size = 0;
  for (int64_t i = 0; i < view.shape[2]; ++i) {
    const auto value = static_cast<float>(
        element(outputs.out, view.dtype,
                row * view.strides[0] + head * view.strides[1] + i * view.strides[2]));
    if (std::isnan(value)) return NAN;
    size = std::max(size, std::fabs(value));
  }
  return size;
}

// Row `row` of the first sequence is the first that sees a special value of KV head 1.
void check_seen_from(AttendCase& one, int64_t row, float special, const std::string& what) {
  const int64_t group = one.num_q_heads / one.params.layer.geometry.num_kv_heads;
  for (const AttendCase::CudaRun& run : one.check_tuned(what)) {
    Differences differences(std::string(run.row) + ", " + what + ": " + one.describe());
    for (int64_t at = 0; at < one.num_rows; ++at)
      for (int64_t head = 0; head < one.num_q_heads; ++head) {
        const bool sees = at >= row && at < one.q_lens[0] && head / group == 1;
        const float size = row_size(one, run.outputs, at, head);
        const bool is_special = !std::isfinite(size);
        if (sees ? std::isnan(special) && !is_special : is_special)
          differences.add("row", at, "head", head, "sees it:", sees, "but has", size);
      }
  }
}

TEST_CASE("a special value that later rows see shows in them alone") {
  if (!has_gpu()) return;
  auto engine = random_engine(7500);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const float special : specials_of(format))
      for (const bool is_key : {true, false})
        for (const int32_t seq_len : {6, 70, 300})
          for (const int32_t splits : {0, 1, 3}) {
            AttendCase one(decode_geometry(format, 2, 16, 128), 16,
                           {{4, seq_len}, {1, 30}, {4, 100}}, engine);
            one.params.num_splits = splits;
            put_special(one.stored(0, seq_len - 2, 1, is_key), draw(engine, 0, 127), special);
            check_seen_from(
                one, 2, special,
                std::string("special ") + std::to_string(special) + (is_key ? " in K" : " in V"));
          }
}

TEST_CASE("special values that a mask or a window hides from some rows") {
  if (!has_gpu()) return;
  auto engine = random_engine(7501);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const float special : specials_of(format))
      for (const bool is_key : {true, false})
        for (int kind = 0; kind < 4; ++kind) {
          AttendCase one(decode_geometry(format, 2, 32, 64), 8, {{8, 90}, {3, 40}, {1, 64}},
                         engine);
          for (const int64_t token : {3, 33, 36})
            put_special(one.stored(1, token, 0, is_key), draw(engine, 0, 63), special);
          for (const int64_t token : {80, 84, 88})
            put_special(one.stored(0, token, 1, is_key), draw(engine, 0, 63), special);
          if (kind == 1) set_tree_mask(one, engine);
          if (kind == 2) one.set_random_mask(engine);
          if (kind == 3) one.params.window_left = 4;
          one.check_tuned("kind " + std::to_string(kind) + " special " + std::to_string(special) +
                          (is_key ? " in K" : " in V"));
        }
}

// NaNs lie there anyway (AttendCase); infinities turn a weight of 0 into a NaN too.
TEST_CASE("what lies before the window and past the length shows nowhere") {
  if (!has_gpu()) return;
  auto engine = random_engine(7502);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const float special : specials_of(format))
      for (const int32_t window : {0, 1, 15, 16, 63, 100})
        for (const int32_t q_len : {1, 3}) {
          AttendCase one(decode_geometry(format, 1, 64, 128), 8, {{q_len, 301}, {q_len, 129}},
                         engine);
          one.params.window_left = window;
          for (const size_t s : {0, 1})
            for (int64_t token = 0; token < one.blocks_of(one.seq_lens[s]) * 64; ++token) {
              if (token >= one.seq_lens[s] - q_len - window && token < one.seq_lens[s]) continue;
              for (const bool is_key : {true, false})
                for (int64_t i = 0; i < 128; i += 16)
                  put_special(one.stored(s, token, 0, is_key), i, special);
            }
          for (const AttendCase::CudaRun& run :
               one.check_tuned("special " + std::to_string(special))) {
            CAPTURE(run.row);
            for (int64_t row = 0; row < one.num_rows; ++row)
              CHECK(std::isfinite(row_size(one, run.outputs, row, 7)));
          }
        }
}

TEST_CASE("keys whose logits are all -inf count as no keys, and one above is all there is") {
  if (!has_gpu()) return;
  auto engine = random_engine(7503);
  CAPTURE(seed());
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp16})
    for (const int32_t splits : {0, 1, 4})
      for (const bool has_finite : {false, true}) {
        AttendCase one(decode_geometry(format, 1, 16, 64), 4, {{1, 200}, {1, 40}}, engine);
        one.params.num_splits = splits;
        for (int64_t i = 0; i < one.num_rows * 4 * 64; ++i)
          put_value(one.q, one.q_view.dtype, i, 0.5f);
        for (int64_t token = has_finite ? 1 : 0; token < 200; ++token)
          put_special(one.stored(0, token, 0, true), 5, -INFINITY);
        for (const AttendCase::CudaRun& run : one.check_tuned("all -inf")) {
          CAPTURE(run.row);
          CHECK(std::isinf(run.outputs.lse[0]) == !has_finite);
          CHECK((row_size(one, run.outputs, 0, 0) == 0.0f) == !has_finite);
        }
      }
}

// What the CPU gives when the keys of the first sequence's block `index` are not there.
Outputs without_block(AttendCase one, int64_t index) {
  const int64_t tokens = one.params.layer.geometry.block_tokens;
  one.set_mask([&](int64_t s, int64_t row, int64_t key) {
    const auto at = static_cast<size_t>(s);
    return key <= one.seq_lens[at] - one.q_lens[at] + row && (s != 0 || key / tokens != index);
  });
  return one.run_cpu();
}

void check_wrong(AttendCase& one, const Outputs& expected, const std::string& what,
                 const kernels::BlockRights* rights = nullptr) {
  for (const AttendCase::CudaRun& run : one.run_cuda(rights)) {
    one.compare(run, expected, what);
    INFO(run.row << ", " << what << ": " << one.describe());
    CHECK(run.fault_count > 0);
  }
}

TEST_CASE("a wrong block in the middle of a sequence is left out, and no other sequence changes") {
  if (!has_gpu()) return;
  auto engine = random_engine(7504);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t block_tokens : {16, 128})
      for (const int32_t q_len : {1, 3})
        for (const int32_t splits : {0, 1, 8}) {
          AttendCase one(decode_geometry(format, 2, block_tokens, 64), 8,
                         {{q_len, 1000}, {q_len, 300}, {q_len, 7}, {q_len, 512}}, engine);
          one.params.num_splits = splits;
          one.params.deterministic = draw(engine, 0, 1) == 0;
          const int64_t index = draw(engine, 0, one.blocks_of(1000) - 2);
          const Outputs expected = without_block(one, index);
          const auto num_blocks = static_cast<int32_t>(one.params.layer.num_blocks);
          const int32_t wrong = pick(engine, {-1, num_blocks, kMax, kMin});
          const int32_t right = one.table[static_cast<size_t>(index)];
          one.table[static_cast<size_t>(index)] = wrong;
          check_wrong(one, expected, "block " + std::to_string(wrong));

          // The same block without the right to read it.
          one.table[static_cast<size_t>(index)] = right;
          std::vector<uint64_t> words(static_cast<size_t>(num_blocks), 0x500000006);
          words[static_cast<size_t>(right)] = 0x600000006;
          const DeviceBytes device(words);
          const kernels::BlockRights rights = {device.data<uint64_t>(), 9, 0x500000006};
          check_wrong(one, expected, "without the right", &rights);
        }
}

TEST_CASE("wrong lengths cut their own sequence alone") {
  if (!has_gpu()) return;
  auto engine = random_engine(7505);
  CAPTURE(seed());
  for (const int32_t q_len : {1, 2}) {
    const AttendCase good(decode_geometry(KvFormat::kNvfp4, 2, 16, 128), 16,
                          {{q_len, 400}, {q_len, 100}, {q_len, 33}}, engine);
    AttendCase on_cpu = good;
    on_cpu.seq_lens[1] = 0;
    const Outputs expected = on_cpu.run_cpu();
    for (const int32_t wrong : {-1, -100, kMin}) {
      AttendCase one = good;
      one.seq_lens[1] = wrong;
      check_wrong(one, expected, "seq_len " + std::to_string(wrong));
    }
    // Past its table row, of which all entries are garbage then: nothing of it is seen.
    for (const int64_t wrong : {good.params.block_table_stride * 16 + 1, int64_t{kMax}}) {
      AttendCase one = good;
      one.seq_lens[1] = static_cast<int32_t>(wrong);
      const auto entries = static_cast<size_t>(good.params.block_table_stride);
      std::fill_n(one.table.begin() + static_cast<int64_t>(entries), entries, -3);
      check_wrong(one, expected, "seq_len " + std::to_string(wrong));
    }
  }
}

TEST_CASE("rows past the last are left out, wherever the lengths that name them stand") {
  if (!has_gpu()) return;
  auto engine = random_engine(7506);
  CAPTURE(seed());
  std::vector<Lengths> lengths;
  for (int i = 0; i < 40; ++i)
    lengths.push_back({1 + i % 2, static_cast<int32_t>(draw(engine, 1, 300))});
  const AttendCase one(decode_geometry(KvFormat::kNvfp4, 1, 16, 128), 8, lengths, engine);
  const Outputs all = AttendCase(one).run_cpu();
  for (const int64_t rows : {1, 2, 30, 59}) {
    AttendCase fewer = one;
    fewer.num_rows = fewer.q_view.shape[0] = rows;
    Outputs expected = all;
    expected.lse.resize(static_cast<size_t>(rows * 8));
    expected.out.resize(static_cast<size_t>(rows * 8 * 128 * 4));
    check_wrong(fewer, expected, "rows " + std::to_string(rows));
  }
}

TEST_CASE("more rows than there are, in one sequence alone or in every one, reach nothing else") {
  if (!has_gpu()) return;
  auto engine = random_engine(7507);
  CAPTURE(seed());
  struct Wrong {
    std::vector<Lengths> lengths;
    int64_t rows;
  };
  const Wrong wrongs[] = {{{{9, 50}}, 4}, {std::vector<Lengths>(40, {29, 60}), 30}};
  for (const Wrong& wrong : wrongs) {
    AttendCase one(decode_geometry(KvFormat::kNvfp4, 2, 16, 64), 8, wrong.lengths, engine);
    for (const int32_t splits : {0, 3})
      for (const bool deterministic : {false, true}) {
        one.params.num_splits = splits;
        one.params.deterministic = deterministic;
        Outputs expected = AttendCase(one).run_cpu();
        AttendCase fewer = one;
        fewer.num_rows = fewer.q_view.shape[0] = wrong.rows;
        expected.lse.resize(static_cast<size_t>(wrong.rows * 8));
        expected.out.resize(static_cast<size_t>(wrong.rows * 8 * 64 * 4));
        check_wrong(fewer, expected,
                    std::to_string(wrong.lengths.size()) + " sequences, " + fewer.describe());
      }
  }
}

}  // namespace
}  // namespace larder::test
