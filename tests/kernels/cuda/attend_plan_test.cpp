// Who takes which tiles in tuned decode attention, followed on the host. Needs no GPU.

// Before every header with device code.
// clang-format off
#include "tests/support/cuda_threads.h"
// clang-format on

#include <cstdint>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_plan_cases.h"
#include "tests/kernels/cuda/attend_plan_run.cuh"
#include "tests/support/random.h"

namespace larder::test {
namespace {

// Threads take turns ten times as slowly where each turn is looked at.
#ifdef __SANITIZE_ADDRESS__
constexpr uint64_t kCases = 100;
#else
constexpr uint64_t kCases = 300;
#endif

TEST_CASE("every tile of decode attention is taken once, in order, and by whom others wait for") {
  constexpr int kMostFailures = 8;
  int num_failures = 0;
  int64_t num_segments = 0;
  int64_t num_slots = 0;
  for (uint64_t number = 0; number < kCases && num_failures < kMostFailures; ++number) {
    const PlanCase one = random_plan_case(number);
    const PlanModel model = model_of(one);
    num_segments += static_cast<int64_t>(model.segments.size());
    try {
      num_slots += one.columns == 8 ? run_columns<8>(one, model) : run_columns<16>(one, model);
    } catch (const PlanError& error) {
      ++num_failures;
      FAIL_CHECK("case " << number << " of seed " << seed() << ": " << error.what << ": "
                         << one.to_string());
    }
  }
  if (num_failures > 0) return;
  CHECK(num_segments > 1000);
  CHECK(num_slots > 1000);
}

TEST_CASE("so many CTAs take whole segments") {
  CHECK(cuda::whole_ctas_of(256, 132) == 128);
  CHECK(cuda::whole_ctas_of(2048, 132) == 128);
  CHECK(cuda::whole_ctas_of(250, 132) == 0);  // 125 would be too few
  CHECK(cuda::whole_ctas_of(260, 132) == 130);
  CHECK(cuda::whole_ctas_of(264, 132) == 0);  // all of them do
  CHECK(cuda::whole_ctas_of(64, 132) == 0);
  CHECK(cuda::whole_ctas_of(208, 108) == 104);
  CHECK(cuda::whole_ctas_of(1, 1) == 0);
}

// Of 6 warps that share 512 tiles in steps of 8, and a segment's beginning that counts as 20: warps
// would begin at 88.67 n - 20. No warp has more than 11 steps, where the last one would have 12.
TEST_CASE("stretches begin at the nearest whole step") {
  const int32_t wanted[] = {68, 157, 246, 334, 423};
  const int32_t begins[] = {72, 160, 248, 336, 424};
  for (int i = 0; i < 5; ++i) CHECK(cuda::nearest_step<8>(wanted[i], 512) == begins[i]);
  CHECK(cuda::nearest_step<8>(3, 512) == 0);
  CHECK(cuda::nearest_step<8>(4, 512) == 8);
  CHECK(cuda::kLastOfFirstStep<8> == 3);
  CHECK(cuda::nearest_step<4>(1, 9) == 0);
  CHECK(cuda::nearest_step<4>(2, 9) == 4);
  CHECK(cuda::kLastOfFirstStep<4> == 1);
  // The end of a segment is no beginning.
  CHECK(cuda::nearest_step<8>(508, 512) == 504);
  CHECK(cuda::nearest_step<8>(508, 513) == 512);
  CHECK(cuda::nearest_step<8>(7, 8) == 0);
  for (const int32_t from : {0, 1, 511}) CHECK(cuda::nearest_step<1>(from, 512) == from);
  CHECK(cuda::kLastOfFirstStep<1> == 0);
}

// 132 CTAs, none of which may get more than 8 units more: 8 * 132 * 132 = 139,392.
TEST_CASE("with few segments and little work so many CTAs get none") {
  be_thread({132, 0, 32, 0});
  cuda::DecodeCall call = {};
  const auto spared = [&](int32_t num_segments, int32_t total, int32_t num_ctas = 132) {
    call.num_segments = num_segments;
    return cuda::spare_ctas(call, total, num_ctas);
  };
  CHECK(spared(8, 8 * 74) == 8);
  CHECK(spared(8, 139'392 / 8) == 8);
  CHECK(spared(8, 139'392 / 8 + 1) == 0);
  CHECK(spared(1, 139'392) == 1);
  CHECK(spared(16, 16 * 74) == 16);
  CHECK(spared(17, 17 * 74) == 0);     // more than one in 8
  CHECK(spared(8, 8 * 14, 112) == 0);  // as many units as CTAs
  CHECK(spared(0, 8 * 74) == 0);       // not known
  CHECK(spared(1, INT32_MAX) == 0);
}

// A sequence of 8 heads and 64 tiles, 592 units for 124 CTAs.
TEST_CASE("CTAs without work are those of the highest numbers") {
  PlanCase one;
  one.q_lens = {1};
  one.seq_lens = {1024};
  one.num_rows = 1;
  one.num_kv_heads = 8;
  one.group = 4;
  one.block_table_stride = 64;
  one.max_tokens = 1024;
  one.begin_tiles = 10;
  one.step_tiles = 4;
  one.grid = 132;
  one.warps = 12;
  one.num_slots = 264;
  one.num_segments = 8;
  const PlanModel model = model_of(one);
  PlanRun<8, 4> run(one, model);
  run.run();
  CHECK(run.working_ctas() == 124);
}

// 32 sequences of 8 heads: 256 segments, two for each of 128 CTAs of 132.
TEST_CASE("segments of equal lengths are not cut between CTAs") {
  PlanCase one;
  one.q_lens.assign(32, 1);
  one.seq_lens.assign(32, 3000);
  one.num_rows = 32;
  one.num_kv_heads = 8;
  one.group = 4;
  one.block_table_stride = 188;
  one.max_tokens = 188 * 16;
  one.begin_tiles = 10;
  one.step_tiles = 4;
  one.grid = 132;
  one.warps = 12;
  one.num_slots = 512;
  one.num_segments = 256;
  CHECK(run_columns<8>(one, model_of(one)) > 100);
  one.whole_ctas = 128;
  CHECK(run_columns<8>(one, model_of(one)) == 0);
  // Lengths that differ: as before.
  one.seq_lens[7] = 2999 - 16;
  CHECK(run_columns<8>(one, model_of(one)) > 100);
}

}  // namespace
}  // namespace larder::test
