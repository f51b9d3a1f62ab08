// attend on a GPU over sequences that begin with the same blocks, which are read once for all where
// a row can: results are those of reading them for each.
#include <functional>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

using Option = std::function<void(AttendCase&, std::mt19937_64&)>;

struct NamedOption {
  const char* name;
  Option set;
};

const std::vector<NamedOption>& options() {
  static const std::vector<NamedOption> all = {
      {"none", [](AttendCase&, auto&) {}},
      {"sinks", [](AttendCase& c, auto& engine) { c.set_sinks(engine); }},
      {"sinks in the lse",
       [](AttendCase& c, auto& engine) {
         c.set_sinks(engine);
         c.spec.lse_form = {true, true, true};
       }},
      {"soft cap", [](AttendCase& c, auto&) { c.params.soft_cap = 4.0f; }},
      {"centred", [](AttendCase& c, auto& e) { c.set_transform(KeyTransform::kCentred, e); }},
      {"rotated", [](AttendCase& c, auto& e) { c.set_transform(KeyTransform::kRotated, e); }},
      {"centred and rotated",
       [](AttendCase& c, auto& e) { c.set_transform(KeyTransform::kCentredRotated, e); }},
      {"partial", [](AttendCase& c, auto&) { c.params.partial = true; }},
      {"deterministic", [](AttendCase& c, auto&) { c.params.deterministic = true; }},
      {"not causal", [](AttendCase& c, auto&) { c.params.causal = false; }},
      {"one split", [](AttendCase& c, auto&) { c.params.num_splits = 1; }},
      {"8 splits", [](AttendCase& c, auto&) { c.params.num_splits = 8; }},
      {"window within the own tokens", [](AttendCase& c, auto&) { c.params.window_left = 20; }},
      {"window within the prefix", [](AttendCase& c, auto&) { c.params.window_left = 200; }},
      {"mask", [](AttendCase& c, auto& engine) { c.set_random_mask(engine); }},
      {"tree mask", [](AttendCase& c, auto& engine) { set_tree_mask(c, engine); }},
      {"bf16 output", [](AttendCase& c, auto&) { c.spec.dtype = Dtype::kBf16; }},
      {"padded rows",
       [](AttendCase& c, auto& engine) {
         c.set_queries(Dtype::kBf16, Layout::kPadded, engine);
         c.spec.layout = Layout::kPadded;
       }},
  };
  return all;
}

// `count` sequences that go on after 320 tokens in common.
AttendCase common_head(KvFormat format, int32_t block_tokens, int32_t q_len, size_t count,
                       std::mt19937_64& engine) {
  std::vector<Lengths> lengths;
  for (size_t s = 0; s < count; ++s)
    lengths.push_back({q_len, 320 + q_len + static_cast<int32_t>(draw(engine, 0, 90))});
  lengths[0].seq_len = 320 + q_len;  // nothing but the prefix before its rows
  AttendCase one(decode_geometry(format, 2, block_tokens, 64), 16, lengths, engine);
  share_head(one, 0, count, 320 / block_tokens);
  return one;
}

TEST_CASE("a head that all sequences share, given or found, gives the CPU's result") {
  if (!has_gpu()) return;
  auto engine = random_engine(7900);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t block_tokens : {16, 32, 64})
      for (const int32_t q_len : {1, 3})
        for (const size_t count : {size_t{1}, size_t{2}, size_t{7}}) {
          AttendCase one = common_head(format, block_tokens, q_len, count, engine);
          const Outputs expected = one.run_cpu();
          for (const int32_t prefix : {kFindSharedPrefix, 320, block_tokens}) {
            one.params.shared_prefix_tokens = prefix;
            one.check_tuned("common head", expected);
          }
        }
  for (const int32_t dim : {128, 256}) {
    AttendCase one(decode_geometry(KvFormat::kNvfp4, 1, 16, dim), 8,
                   std::vector<Lengths>(40, {1, 350}), engine);
    share_head(one, 0, 40, 20);
    for (const int32_t prefix : {kFindSharedPrefix, 320}) {
      one.params.shared_prefix_tokens = prefix;
      one.check_tuned("40 sequences");
    }
  }
}

TEST_CASE("every option is right over a shared head") {
  if (!has_gpu()) return;
  auto engine = random_engine(7901);
  CAPTURE(seed());
  for (const NamedOption& option : options())
    for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kBf16})
      for (const int32_t q_len : {1, 3}) {
        AttendCase one = common_head(format, 16, q_len, 9, engine);
        option.set(one, engine);
        const Outputs expected = one.run_cpu();
        for (const int32_t prefix : {kFindSharedPrefix, 320}) {
          one.params.shared_prefix_tokens = prefix;
          one.check_tuned(option.name, expected);
        }
      }
}

// Runs of neighbours: 3 to 11 with 25 blocks in common, 12 to 19 with others, 25 to 27 with one;
// the rest are alone. Two of the first run are shorter than what their tables share, one has no
// row, one more rows than tokens.
AttendCase mixed_runs(KvFormat format, int32_t q_len, std::mt19937_64& engine) {
  std::vector<Lengths> lengths;
  for (int s = 0; s < 30; ++s)
    lengths.push_back({q_len, static_cast<int32_t>(draw(engine, 410, 600))});
  lengths[0] = {q_len, 20};
  lengths[5] = {q_len, 200};
  lengths[6] = {0, 450};
  lengths[8] = {q_len, 399};  // its rows lie in the last of the blocks in common
  lengths[9] = {q_len, 401};
  lengths[10] = {4, 2};
  lengths[14] = {q_len, 0};
  AttendCase one(decode_geometry(format, 1, 16, 64), 8, lengths, engine);
  share_head(one, 3, 12, 25);
  share_head(one, 12, 20, 25);
  share_head(one, 25, 28, 1);
  return one;
}

TEST_CASE("runs of neighbours with heads of their own, and sequences that share none") {
  if (!has_gpu()) return;
  auto engine = random_engine(7902);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t q_len : {1, 3})
      for (const bool deterministic : {false, true}) {
        AttendCase one = mixed_runs(format, q_len, engine);
        one.params.shared_prefix_tokens = kFindSharedPrefix;
        one.params.deterministic = deterministic;
        one.check_tuned("runs");
      }
  for (const NamedOption& option : options()) {
    AttendCase one = mixed_runs(KvFormat::kNvfp4, 2, engine);
    option.set(one, engine);
    one.params.shared_prefix_tokens = kFindSharedPrefix;
    one.check_tuned(option.name);
  }
}

TEST_CASE("hundreds of sequences over one long head, and tables that are equal throughout") {
  if (!has_gpu()) return;
  auto engine = random_engine(7903);
  CAPTURE(seed());
  std::vector<Lengths> lengths = {{1, 4200}};
  for (int s = 1; s < 300; ++s) lengths.push_back({1, static_cast<int32_t>(draw(engine, 1, 60))});
  AttendCase one(decode_geometry(KvFormat::kNvfp4, 1, 16, 64), 8, lengths, engine);
  // Their own tokens come after the 4096 in common.
  const auto stride = static_cast<size_t>(one.params.block_table_stride);
  for (size_t s = 1; s < 300; ++s) {
    const int64_t own = one.blocks_of(one.seq_lens[s]);
    std::copy_n(one.table.begin() + static_cast<int64_t>(s * stride), own,
                one.table.begin() + static_cast<int64_t>(s * stride) + 256);
    std::copy_n(one.table.begin(), 256, one.table.begin() + static_cast<int64_t>(s * stride));
    one.seq_lens[s] += 4096;
  }
  const Outputs expected = one.run_cpu();
  for (const int32_t prefix : {kFindSharedPrefix, 4096, 2048}) {
    one.params.shared_prefix_tokens = prefix;
    one.check_tuned("one long head", expected);
  }
  AttendCase equal(decode_geometry(KvFormat::kNvfp4, 1, 16, 64), 8,
                   std::vector<Lengths>(20, {2, 500}), engine);
  share_head(equal, 0, 20, equal.params.block_table_stride);
  equal.params.shared_prefix_tokens = kFindSharedPrefix;
  equal.check_tuned("equal tables");
}

TEST_CASE("a NaN in a shared head shows in all, and a wrong block of it is left out for all") {
  if (!has_gpu()) return;
  auto engine = random_engine(7904);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t prefix : {kFindSharedPrefix, 320}) {
      for (const bool is_key : {true, false}) {
        AttendCase one = common_head(format, 16, 1, 9, engine);
        one.params.shared_prefix_tokens = prefix;
        put_special(one.stored(4, 100, 1, is_key), 37, NAN);
        one.check_tuned(is_key ? "NaN in K" : "NaN in V");
      }
      AttendCase one = common_head(format, 16, 1, 9, engine);
      one.params.shared_prefix_tokens = prefix;
      AttendCase hidden = one;
      hidden.set_mask([](int64_t, int64_t, int64_t key) { return key / 16 != 7; });
      const Outputs expected = hidden.run_cpu();
      for (size_t s = 0; s < 9; ++s)
        one.table[s * static_cast<size_t>(one.params.block_table_stride) + 7] = -9;
      for (const AttendCase::CudaRun& run : one.run_cuda()) {
        one.compare(run, expected, "wrong block");
        CAPTURE(run.row);
        CHECK(run.fault_count > 0);
      }
    }
}

}  // namespace
}  // namespace larder::test
