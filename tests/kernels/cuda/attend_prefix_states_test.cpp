// The attention of shared prefixes on a GPU: which sequences share one, and what it leaves for the
// kernel that goes on from there.
#include <cmath>
#include <limits>
#include <utility>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_prefix_case.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

AttentionGeometry geometry_of(KvFormat format, int32_t dim, int32_t kv_heads,
                              int32_t block_tokens) {
  return {1, kv_heads, block_tokens, dim, dim, format, format};
}

AttendCase make_case(const AttentionGeometry& geometry, int64_t heads,
                     const std::vector<Lengths>& lengths, int32_t shared, std::mt19937_64& engine) {
  AttendCase one(geometry, heads, lengths, engine);
  one.set_queries(engine() % 2 == 0 ? Dtype::kBf16 : Dtype::kFp16, Layout::kDense, engine);
  one.params.shared_prefix_tokens = shared;
  return one;
}

TEST_CASE("a given prefix is attended for all rows in every format and size") {
  if (!has_gpu()) return;
  auto engine = random_engine(7600);
  CAPTURE(seed());
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kFp16})
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t block_tokens : {16, 32, 128}) {
        if (format == KvFormat::kFp16 && dim == 256) continue;
        // Pairs for one group of warps, for two and for more, with rows to spare.
        const int64_t group = block_tokens == 16 ? 3 : block_tokens == 32 ? 8 : 16;
        std::vector<Lengths> lengths = {{0, 40}, {1, 700}, {5, 645}, {3, 900}, {0, 0}, {2, 800}};
        AttendCase one =
            make_case(geometry_of(format, dim, 2, block_tokens), 2 * group, lengths, 640, engine);
        share(one, {1, 3, 640});
        share(one, {1, 5, 640});
        const PrefixResults results = run_prefix(one);
        compare_prefix(one, results, {0, 640, 640, 640, 0, 640}, "given");
        CHECK(results.fault_count == 0);
      }
}

TEST_CASE("a given prefix is cut to whole blocks that every sequence has before its rows") {
  if (!has_gpu()) return;
  auto engine = random_engine(7601);
  CAPTURE(seed());
  const AttentionGeometry geometry = geometry_of(KvFormat::kNvfp4, 64, 1, 16);
  for (const int32_t least : {0, 15, 16, 81, 287, 640}) {
    AttendCase one = make_case(geometry, 4, {{1, 500}, {2, least + 2}, {1, 400}}, 288, engine);
    const int32_t tokens = std::min(least, 288) / 16 * 16;
    share(one, {0, 3, tokens});
    compare_prefix(one, run_prefix(one), {tokens, tokens, tokens}, "cut");
  }
  AttendCase one = make_case(geometry, 4, {{1, 500}, {4, 2}, {1, 400}}, 288, engine);
  CHECK(run_prefix(one).tokens == std::vector<int32_t>{0, 0, 0});
}

TEST_CASE("prefixes of neighbours with equal table rows are found") {
  if (!has_gpu()) return;
  auto engine = random_engine(7602);
  CAPTURE(seed());
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kFp16}) {
    std::vector<Lengths> lengths = {{1, 700}, {1, 650}, {2, 600}, {1, 30},  {1, 800}, {0, 900},
                                    {1, 900}, {7, 999}, {1, 520}, {1, 530}, {1, 540}};
    AttendCase one =
        make_case(geometry_of(format, 128, 2, 16), 16, lengths, kFindSharedPrefix, engine);
    share(one, {0, 2, 640});
    share(one, {1, 2, 592});  // the run of three has what all of them share
    share(one, {4, 3, 800});  // one of them without rows
    share(one, {6, 2, 976});  // more than one has before its row
    share(one, {8, 2, 496});  // too short
    share(one, {9, 2, 528});  // whole blocks before the rows: 528 of 529
    compare_prefix(one, run_prefix(one), {592, 592, 592, 0, 0, 0, 896, 896, 0, 528, 528}, "found");
  }
}

TEST_CASE("many sequences in several runs, and one run across the planner's rounds") {
  if (!has_gpu()) return;
  auto engine = random_engine(7603);
  CAPTURE(seed());
  std::vector<Lengths> lengths;
  for (int s = 0; s < 600; ++s) lengths.push_back({1, 544});
  AttendCase one =
      make_case(geometry_of(KvFormat::kNvfp4, 64, 1, 32), 1, lengths, kFindSharedPrefix, engine);
  share(one, {0, 100, 512});
  share(one, {100, 400, 512});
  share(one, {505, 95, 512});
  std::vector<int32_t> tokens(600, 512);
  std::fill(tokens.begin() + 500, tokens.begin() + 505, 0);
  tokens[512] = 512;  // begins a round: its own run
  compare_prefix(one, run_prefix(one), tokens, "many");
}

TEST_CASE("transforms, soft caps and scales of either sign") {
  if (!has_gpu()) return;
  auto engine = random_engine(7604);
  CAPTURE(seed());
  for (const int32_t dim : {64, 128, 256})
    for (const KeyTransform transform : {KeyTransform::kNone, KeyTransform::kCentred,
                                         KeyTransform::kRotated, KeyTransform::kCentredRotated})
      for (const float soft_cap : {0.0f, 2.5f})
        for (const float sign : {1.0f, -1.0f}) {
          AttendCase one = make_case(geometry_of(KvFormat::kNvfp4, dim, 2, 64), 8,
                                     {{2, 450}, {9, 500}, {1, 451}}, 448, engine);
          one.set_transform(transform, engine);
          one.params.soft_cap = soft_cap;
          one.params.scale *= sign;
          share(one, {0, 3, 448});
          compare_prefix(one, run_prefix(one), {448, 448, 448}, "options");
        }
}

TEST_CASE("great and small queries keep their precision") {
  if (!has_gpu()) return;
  auto engine = random_engine(7605);
  CAPTURE(seed());
  for (const float size : {0x1p-60f, 0x1p-10f, 0x1p10f, 0x1p60f}) {
    AttendCase one = make_case(geometry_of(KvFormat::kFp8E4m3, 128, 1, 16), 4, {{1, 600}, {1, 600}},
                               592, engine);
    one.set_queries(Dtype::kBf16, Layout::kDense, engine);
    for (int64_t i = 0; i < one.num_rows * 4 * 128; ++i)
      put_value(one.q, Dtype::kBf16, i, static_cast<float>(element(one.q, Dtype::kBf16, i)) * size);
    one.params.scale /= size;
    share(one, {0, 2, 592});
    compare_prefix(one, run_prefix(one), {592, 592}, "sizes");
  }
}

TEST_CASE("blocks that may not be used are left out and counted") {
  if (!has_gpu()) return;
  auto engine = random_engine(7606);
  CAPTURE(seed());
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kFp16})
    for (const int32_t mode : {kFindSharedPrefix, 576}) {
      AttendCase one =
          make_case(geometry_of(format, 64, 2, 16), 4, {{1, 600}, {1, 590}}, mode, engine);
      share(one, {0, 2, 576});
      const AttendCase named = one;
      const auto stride = static_cast<size_t>(one.params.block_table_stride);
      for (const size_t s : {size_t{0}, size_t{1}}) {
        one.table[s * stride] = -1;
        one.table[s * stride + 7] = static_cast<int32_t>(one.params.layer.num_blocks);
        for (size_t block = 20; block < 24; ++block)  // a whole tile of keys
          one.table[s * stride + block] = std::numeric_limits<int32_t>::max();
      }
      const PrefixResults results = run_prefix(one);
      one.table = named.table;
      compare_prefix(one, results, {576, 576}, "bad blocks", [](int64_t token) {
        const int64_t block = token / 16;
        return block == 0 || block == 7 || (block >= 20 && block < 24);
      });
      CHECK(results.fault_count > 0);
    }
}

TEST_CASE("a NaN among keys or values shows in every row of its head, and in no other") {
  if (!has_gpu()) return;
  auto engine = random_engine(7607);
  CAPTURE(seed());
  for (const bool is_key : {false, true}) {
    AttendCase one = make_case(geometry_of(KvFormat::kNvfp4, 64, 2, 16), 4, {{1, 600}, {3, 600}},
                               kFindSharedPrefix, engine);
    share(one, {0, 2, 592});
    one.stored(0, 333, 1, is_key).scales[2] = std::byte{0x7F};
    const PrefixResults results = run_prefix(one);
    for (int64_t row = 0; row < 4; ++row)
      for (int64_t head = 0; head < 4; ++head) {
        CAPTURE(row);
        CAPTURE(head);
        const Finished finished = finish(one, results, row, head);
        CHECK(std::isnan(finished.out[40]) == (head >= 2));
        CHECK(std::isnan(finished.lse) == (head >= 2 && is_key));
      }
  }
}

// More KV heads than there are multiprocessors for two tiles of pairs each: one split, two items
// for a CTA, of more tiles of keys than stages and than a warp has ids of at once.
TEST_CASE("a CTA takes several items of many tiles") {
  if (!has_gpu()) return;
  auto engine = random_engine(7609);
  CAPTURE(seed());
  constexpr std::pair<KvFormat, int32_t> kLayers[] = {{KvFormat::kNvfp4, 64},
                                                      {KvFormat::kNvfp4, 128},
                                                      {KvFormat::kFp8E4m3, 64},
                                                      {KvFormat::kFp16, 64}};
  for (const auto& [format, dim] : kLayers) {
    AttendCase one =
        make_case(geometry_of(format, dim, 67, 64), 134, {{33, 2200}, {32, 2150}}, 2112, engine);
    share(one, {0, 2, 2112});
    const PrefixResults results = run_prefix(one);
    CHECK(results.num_splits == 1);
    compare_prefix(one, results, {2112, 2112}, "several items");
  }
}

TEST_CASE("calls that the kernels of prefixes do not take") {
  if (!has_gpu()) return;
  auto engine = random_engine(7608);
  const auto is_used = [&](const auto& change) {
    AttendCase one =
        make_case(geometry_of(KvFormat::kNvfp4, 128, 2, 16), 8, {{1, 600}, {1, 600}}, 592, engine);
    change(one);
    Uploads uploads;
    return kernels::cuda::prefix_layout(one.call(uploads)).is_used;
  };
  CHECK(is_used([](AttendCase&) {}));
  CHECK(!is_used([](AttendCase& c) { c.params.shared_prefix_tokens = 0; }));
  CHECK(!is_used([](AttendCase& c) { c.params.deterministic = true; }));
  CHECK(!is_used([](AttendCase& c) { c.params.window_left = 9; }));
  CHECK(!is_used([](AttendCase& c) { c.params.num_splits = 2; }));
  CHECK(!is_used([](AttendCase& c) { c.params.shard.num_ranks = 2; }));
  CHECK(!is_used([&](AttendCase& c) { c.set_alibi(engine); }));
  CHECK(!is_used([&](AttendCase& c) { c.set_random_mask(engine); }));
  CHECK(!is_used([&](AttendCase& c) { c.set_queries(Dtype::kFp32, Layout::kDense, engine); }));
  CHECK(!is_used([&](AttendCase& c) { c.set_queries(Dtype::kBf16, Layout::kGaps, engine); }));
  CHECK(!is_used([](AttendCase& c) { c.params.layer.geometry.v_format = KvFormat::kFp8E4m3; }));
}

}  // namespace
}  // namespace larder::test
