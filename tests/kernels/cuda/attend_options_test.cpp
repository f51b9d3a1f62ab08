// attend on a GPU: every option alone, and all of them mixed.
#include <functional>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_case.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

using Option = std::function<void(AttendCase&, std::mt19937_64&)>;

struct NamedOption {
  std::string name;
  Option set;
};

std::vector<NamedOption> number_options() {
  std::vector<NamedOption> options;
  options.push_back({"none", [](AttendCase&, auto&) {}});
  options.push_back({"not causal", [](AttendCase& c, auto&) { c.params.causal = false; }});
  for (const int32_t window : {0, 1, 31, 32, 100})
    options.push_back({"window " + std::to_string(window),
                       [=](AttendCase& c, auto&) { c.params.window_left = window; }});
  options.push_back({"window, not causal", [](AttendCase& c, auto&) {
                       c.params.window_left = 5;
                       c.params.causal = false;
                     }});
  options.push_back({"soft cap", [](AttendCase& c, auto&) { c.params.soft_cap = 1.5f; }});
  options.push_back({"alibi", [](AttendCase& c, auto& engine) { c.set_alibi(engine); }});
  options.push_back({"sinks", [](AttendCase& c, auto& engine) { c.set_sinks(engine); }});
  options.push_back({"special sinks", [](AttendCase& c, auto& engine) {
                       c.set_sinks(engine);
                       c.sinks[0] = -INFINITY;
                       c.sinks[1] = INFINITY;
                       c.sinks[2] = NAN;
                     }});
  options.push_back({"mask", [](AttendCase& c, auto& engine) { c.set_random_mask(engine); }});
  options.push_back({"mask, window", [](AttendCase& c, auto& engine) {
                       c.set_random_mask(engine);
                       c.params.window_left = 17;
                     }});
  options.push_back({"partial", [](AttendCase& c, auto&) { c.params.partial = true; }});
  for (const int32_t splits : {1, 2, 3, 8, 300, 4096})
    options.push_back({"splits " + std::to_string(splits),
                       [=](AttendCase& c, auto&) { c.params.num_splits = splits; }});
  for (const auto transform :
       {KeyTransform::kCentred, KeyTransform::kRotated, KeyTransform::kCentredRotated})
    options.push_back({std::string(name(transform)),
                       [=](AttendCase& c, auto& engine) { c.set_transform(transform, engine); }});
  return options;
}

std::vector<NamedOption> output_options() {
  std::vector<NamedOption> options;
  for (const bool base2 : {false, true})
    for (const bool includes_sink : {false, true})
      for (const bool heads_first : {false, true})
        options.push_back({"lse form", [=](AttendCase& c, auto& engine) {
                             c.spec.lse_form = {base2, includes_sink, heads_first};
                             c.set_sinks(engine);
                           }});
  options.push_back({"no lse", [](AttendCase& c, auto&) { c.spec.wants_lse = false; }});
  for (const Dtype dtype :
       {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32, Dtype::kFp8E4m3, Dtype::kE2m1x2})
    for (const Layout layout : {Layout::kDense, Layout::kHeadsFirst, Layout::kGaps})
      options.push_back({"output", [=](AttendCase& c, auto& engine) {
                           c.spec.dtype = dtype;
                           c.spec.layout = layout;
                           c.spec.out_sf_first_row = static_cast<int64_t>(engine() % 200);
                         }});
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32})
    for (const Layout layout : {Layout::kDense, Layout::kHeadsFirst, Layout::kGaps})
      options.push_back(
          {"queries", [=](AttendCase& c, auto& engine) { c.set_queries(dtype, layout, engine); }});
  return options;
}

TEST_CASE("every option alone gives the CPU's result, with and without splits") {
  if (!has_gpu()) return;
  auto engine = random_engine(7200);
  CAPTURE(seed());
  auto options = number_options();
  for (const NamedOption& option : output_options()) options.push_back(option);
  for (const NamedOption& option : options)
    for (const int32_t splits : {0, 3}) {
      AttendCase one({1, 2, 16, 96, 80, KvFormat::kFp8E4m3, KvFormat::kNvfp4}, 6,
                     {{1, 150}, {20, 70}, {0, 3}, {4, 2}}, engine);
      one.params.num_splits = splits;
      option.set(one, engine);
      one.check(option.name);
    }
}

TEST_CASE("every option alone on MLA rows") {
  if (!has_gpu()) return;
  auto engine = random_engine(7201);
  CAPTURE(seed());
  const MlaRow rows[] = {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16};
  auto options = number_options();
  for (const NamedOption& option : output_options()) options.push_back(option);
  size_t turn = 0;
  for (const NamedOption& option : options) {
    if (option.name == "centred" || option.name == "rotated" || option.name == "centred_rotated")
      continue;  // MLA rows have no transform
    AttendCase one(mla_geometry(1, 64, rows[turn++ % 4]), 20, {{1, 90}, {3, 70}}, engine);
    option.set(one, engine);
    one.check(option.name);
  }
}

// A geometry of any kind, MLA too.
AttentionGeometry random_geometry(std::mt19937_64& engine) {
  const int32_t blocks[] = {1, 16, 16, 64, 1024};
  const int32_t block_tokens = blocks[engine() % 5];
  if (engine() % 4 == 0)
    return mla_geometry(1, block_tokens, static_cast<MlaRow>(1 + engine() % 4));
  const int32_t dims[] = {64, 80, 96, 112, 128, 192, 256, 512};
  const int32_t k_dim = dims[engine() % 8];
  return {1,
          static_cast<int32_t>(1 + engine() % 4),
          block_tokens,
          k_dim,
          engine() % 2 == 0 ? k_dim : dims[engine() % 8],
          static_cast<KvFormat>(engine() % 5),
          static_cast<KvFormat>(engine() % 5)};
}

AttendCase random_case(std::mt19937_64& engine) {
  const AttentionGeometry geometry = random_geometry(engine);
  const bool is_mla = geometry.mla_row != MlaRow::kNone;
  const int64_t group = is_mla && engine() % 2 == 0 ? 128 : static_cast<int64_t>(1 + engine() % 16);
  std::vector<Lengths> lengths;
  for (size_t s = engine() % 6; s-- > 0;)
    lengths.push_back({static_cast<int32_t>(engine() % 2 == 0 ? 1 : engine() % 24),
                       static_cast<int32_t>(engine() % 300)});
  AttendCase one(geometry, group * geometry.num_kv_heads, lengths, engine,
                 static_cast<int64_t>(engine() % 4));
  const auto maybe = [&] { return engine() % 3 == 0; };
  constexpr Layout kLayouts[] = {Layout::kDense, Layout::kHeadsFirst, Layout::kGaps};
  one.set_queries(static_cast<Dtype>(engine() % 3), kLayouts[engine() % 3], engine);
  one.spec.dtype = static_cast<Dtype>(engine() % 5);
  one.spec.layout = kLayouts[engine() % 3];
  one.spec.lse_form = {maybe(), maybe(), maybe()};
  one.spec.out_sf_first_row = maybe() ? static_cast<int64_t>(engine() % 300) : 0;
  one.spec.wants_lse = !maybe();
  one.params.causal = !maybe();
  if (maybe()) one.params.window_left = static_cast<int32_t>(engine() % 200);
  if (maybe()) one.params.soft_cap = 2.0f;
  if (one.params.soft_cap == 0.0f && maybe()) one.set_alibi(engine);
  if (maybe()) one.set_sinks(engine);
  if (one.sinks.empty()) one.params.partial = maybe();
  if (maybe()) one.set_random_mask(engine);
  const int32_t splits[] = {0, 0, 1, 3, 8};
  one.params.num_splits = splits[engine() % 5];
  if (!is_mla && maybe()) one.set_transform(static_cast<KeyTransform>(1 + engine() % 3), engine);
  return one;
}

TEST_CASE("random mixtures of geometry and options") {
  if (!has_gpu()) return;
  auto engine = random_engine(7202);
  CAPTURE(seed());
  for (int round = 0; round < 200; ++round)
    random_case(engine).check("round " + std::to_string(round));
}

}  // namespace
}  // namespace larder::test
