// Every option of attend, alone and in pairs, against the float64 oracle.
#include <cmath>
#include <functional>
#include <string>

#include <doctest/doctest.h>

#include "tests/kernels/attend_call.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::AttendBatch;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// An attention call under construction; the defaults are a causal one over bf16.
struct Case {
  AttentionGeometry geometry = {1, 2, 7, 32, 48, KvFormat::kBf16, KvFormat::kBf16};
  int64_t ratio = 2;
  KeyTransform transform = KeyTransform::kNone;
  bool causal = true;
  bool mask = false;
  int32_t window_left = -1;
  float soft_cap = 0;
  bool alibi = false;
  bool sinks = false;
  bool partial = false;
  int32_t num_splits = 0;
  Dtype q_dtype = Dtype::kFp32;
  Dtype out_dtype = Dtype::kFp32;
  LseForm lse_form;

  void set_formats(KvFormat k, KvFormat v) { geometry = {1, 2, 7, 32, 48, k, v}; }
  void set_mla(MlaRow row) { geometry = mla_geometry(1, 7, row); }
};

AttendBatch make_batch(const Case& c, std::mt19937_64& engine) {
  AttendBatch batch(c.geometry, c.geometry.num_kv_heads * c.ratio,
                    {{3, 70}, {1, 90}, {4, 2}, {1, 0}}, engine);
  if (c.transform != KeyTransform::kNone) batch.transform_keys(c.transform, engine);
  batch.causal = c.causal;
  if (c.mask) batch.set_random_masks(engine);
  batch.window_left = c.window_left;
  batch.soft_cap = c.soft_cap;
  std::normal_distribution<float> normal;
  for (int64_t head = 0; head < batch.num_q_heads(); ++head) {
    if (c.alibi) batch.alibi_slopes.push_back(normal(engine) / 8);
    if (c.sinks) batch.sinks.push_back(normal(engine) * 3);
  }
  batch.partial = c.partial;
  batch.num_splits = c.num_splits;
  batch.q_dtype = c.q_dtype;
  batch.out_dtype = c.out_dtype;
  batch.out_scale = 0.25f;
  batch.lse_form = c.lse_form;
  return batch;
}

struct Feature {
  std::string group;
  std::string name;
  std::function<void(Case&)> apply;
};

std::vector<Feature> features() {
  std::vector<Feature> all = {
      {"causal", "not causal", [](Case& c) { c.causal = false; }},
      {"causal", "mask", [](Case& c) { c.mask = true; }},
      {"window", "window 0", [](Case& c) { c.window_left = 0; }},
      {"window", "window 20", [](Case& c) { c.window_left = 20; }},
      {"cap", "soft cap", [](Case& c) { c.soft_cap = 1.5f; }},
      {"alibi", "alibi", [](Case& c) { c.alibi = true; }},
      {"sinks", "sinks", [](Case& c) { c.sinks = true; }},
      {"partial", "partial", [](Case& c) { c.partial = true; }},
      {"splits", "1 split", [](Case& c) { c.num_splits = 1; }},
      {"splits", "3 splits", [](Case& c) { c.num_splits = 3; }},
      {"splits", "200 splits", [](Case& c) { c.num_splits = 200; }},
      {"ratio", "ratio 1", [](Case& c) { c.ratio = 1; }},
      {"ratio", "ratio 7", [](Case& c) { c.ratio = 7; }},
      {"ratio", "ratio 33", [](Case& c) { c.ratio = 33; }},
      {"q", "q bf16", [](Case& c) { c.q_dtype = Dtype::kBf16; }},
      {"q", "q fp16", [](Case& c) { c.q_dtype = Dtype::kFp16; }},
      {"out", "out bf16", [](Case& c) { c.out_dtype = Dtype::kBf16; }},
      {"out", "out fp16", [](Case& c) { c.out_dtype = Dtype::kFp16; }},
      {"out", "out fp8", [](Case& c) { c.out_dtype = Dtype::kFp8E4m3; }},
      {"lse", "base 2", [](Case& c) { c.lse_form.base2 = true; }},
      {"lse", "with sink", [](Case& c) { c.lse_form.includes_sink = true; }},
      {"lse", "base 2 with sink",
       [](Case& c) {
         c.lse_form = {true, true, false};
       }},
  };
  const std::pair<KvFormat, KvFormat> formats[] = {
      {KvFormat::kBf16, KvFormat::kBf16},       {KvFormat::kFp16, KvFormat::kFp16},
      {KvFormat::kFp8E4m3, KvFormat::kFp8E4m3}, {KvFormat::kFp8E5m2, KvFormat::kFp8E5m2},
      {KvFormat::kNvfp4, KvFormat::kNvfp4},     {KvFormat::kFp8E4m3, KvFormat::kNvfp4},
      {KvFormat::kNvfp4, KvFormat::kFp16}};
  for (const auto& [k, v] : formats)
    all.push_back({"format", std::string(name(k)) + " " + std::string(name(v)),
                   [k = k, v = v](Case& c) { c.set_formats(k, v); }});
  for (const MlaRow row : {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16})
    all.push_back({"format", std::string(name(row)), [=](Case& c) { c.set_mla(row); }});
  for (const KeyTransform transform :
       {KeyTransform::kCentred, KeyTransform::kRotated, KeyTransform::kCentredRotated})
    all.push_back(
        {"transform", std::string(name(transform)), [=](Case& c) { c.transform = transform; }});
  return all;
}

// Of the relative L2 error. The smallest fp8 values are 2^-9 apart (times the scale that is stored
// with), however small the outputs are.
double max_out_error(Dtype dtype, const std::vector<double>& expected, double out_scale) {
  if (dtype == Dtype::kFp8E4m3) {
    double squares = 0;
    for (const double x : expected) squares += x * x;
    const double size = std::sqrt(squares / static_cast<double>(expected.size()));
    return 0.04 + (size > 0 ? 0x1p-10 * out_scale / size : 0);
  }
  if (dtype == Dtype::kBf16) return 4e-3;
  return dtype == Dtype::kFp16 ? 5e-4 : 2e-5;
}

// What the oracle's LSEs are in the call's form.
test::DenseResult in_form(test::DenseResult result, const Case& c) {
  if (c.lse_form.includes_sink && c.sinks) result.lse = result.lse_with_sink;
  if (c.lse_form.base2)
    for (double& lse : result.lse) lse /= std::log(2.0);
  return result;
}

// On every target of the machine, or on the next one in turn.
void check_case(const Case& c, std::mt19937_64& engine, bool every_target) {
  AttendBatch batch = make_batch(c, engine);
  const test::DenseResult expected = in_form(batch.oracle(), c);
  const auto check = [&](const std::string& target) {
    CAPTURE(target);
    const test::Closeness closeness = compare(batch.run(), expected);
    CHECK(closeness.empty_rows_match);
    CHECK(closeness.lse <= 2e-5);
    CHECK(closeness.out <= max_out_error(c.out_dtype, expected.out, batch.out_scale));
  };
  if (every_target)
    test::on_every_target(check);
  else
    test::on_next_target(check);
}

void check_refused(const Case& c, ErrorCode code, std::mt19937_64& engine) {
  AttendBatch batch = make_batch(c, engine);
  test::AttendResult result;
  const Status status = batch.try_rows({3, 1, 4, 1}, {70, 90, 2, 0}, 0, 0, result);
  CHECK(status.code() == code);
  for (const float lse : result.lse) REQUIRE(std::isnan(lse));
}

TEST_CASE("every option and every pair of options agrees with the oracle, or is refused") {
  auto engine = test::random_engine(60);
  CAPTURE(test::seed());
  const std::vector<Feature> all = features();
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = i; j < all.size(); ++j) {
      if (i != j && all[i].group == all[j].group) continue;
      const std::string both = all[i].name + ", " + all[j].name;
      CAPTURE(both);
      Case c;
      all[i].apply(c);
      all[j].apply(c);
      const bool transformed_mla =
          c.geometry.mla_row != MlaRow::kNone && c.transform != KeyTransform::kNone;
      if ((c.soft_cap > 0 && c.alibi) || transformed_mla)
        check_refused(c, ErrorCode::kUnsupported, engine);
      else if (c.sinks && c.partial)
        check_refused(c, ErrorCode::kInvalidArgument, engine);
      else
        check_case(c, engine, i == j);
    }
}

TEST_CASE("random handfuls of options agree with the oracle") {
  auto engine = test::random_engine(61);
  CAPTURE(test::seed());
  const std::vector<Feature> all = features();
  for (int round = 0; round < 200; ++round) {
    Case c;
    std::string names;
    for (int i = 0; i < 8; ++i) {
      const Feature& feature = all[engine() % all.size()];
      if (feature.group == "partial" || feature.group == "transform") continue;
      feature.apply(c);
      names += feature.name + "; ";
    }
    if (c.soft_cap > 0) c.alibi = false;
    if (c.geometry.mla_row == MlaRow::kNone && engine() % 2 == 0)
      c.set_formats(static_cast<KvFormat>(engine() % kKvFormatNames.size()),
                    static_cast<KvFormat>(engine() % kKvFormatNames.size()));
    if (c.geometry.mla_row == MlaRow::kNone)
      c.transform = static_cast<KeyTransform>(engine() % kKeyTransformNames.size());
    CAPTURE(names);
    check_case(c, engine, false);
  }
}

TEST_CASE("lse with heads first holds the same numbers in the other order") {
  auto engine = test::random_engine(62);
  AttendBatch batch = make_batch({}, engine);
  const test::AttendResult rows_first = batch.run();
  batch.lse_form.heads_first = true;
  const test::AttendResult heads_first = batch.run();
  CHECK(heads_first.out == rows_first.out);
  const auto rows = static_cast<size_t>(batch.num_rows());
  const auto heads = static_cast<size_t>(batch.num_q_heads());
  for (size_t row = 0; row < rows; ++row)
    for (size_t head = 0; head < heads; ++head)
      REQUIRE(heads_first.lse[head * rows + row] == rows_first.lse[row * heads + head]);
}

TEST_CASE("options that are off, or change nothing, give the bits of the plain call") {
  auto engine = test::random_engine(63);
  CAPTURE(test::seed());
  AttendBatch batch = make_batch({}, engine);
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    const test::AttendResult plain = batch.run();
    batch.num_splits = 1;
    CHECK(batch.run() == plain);
    batch.num_splits = 0;
    batch.partial = true;
    CHECK(batch.run() == plain);
    batch.partial = false;
    batch.sinks.assign(4, -kInfinity);
    CHECK(batch.run() == plain);
    batch.lse_form.includes_sink = true;
    CHECK(batch.run() == plain);
    batch.sinks.clear();
    CHECK(batch.run() == plain);
    batch.lse_form.includes_sink = false;
    batch.alibi_slopes.assign(4, 0.0f);
    CHECK(batch.run() == plain);
    batch.alibi_slopes.clear();
  });
  // A mask of the causal triangle is causality.
  const test::AttendResult plain = batch.run();
  for (size_t s = 0; s < batch.sequences().size(); ++s) {
    const auto [q_len, seq_len] = batch.sequences()[s];
    std::vector<bool> bits;
    for (int i = 0; i < q_len; ++i)
      for (int j = 0; j < seq_len; ++j) bits.push_back(j <= seq_len - q_len + i);
    batch.set_mask(s, bits);
  }
  CHECK(batch.run() == plain);
  batch.causal = false;
  CHECK(batch.run() == plain);
}

}  // namespace
}  // namespace larder::kernels
