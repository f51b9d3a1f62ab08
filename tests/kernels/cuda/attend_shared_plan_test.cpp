// Plans that calls of the tuned row share: the results are those of calls that plan for themselves,
// to the bit, since the work is dealt out alike.
#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_shared_plan_case.h"

namespace larder::test {
namespace {

// What the plan's memory begins with; 0: there is none.
uint64_t key_of(const DeviceBytes& plan) { return plan.read<uint64_t>()[0]; }

TEST_CASE("layers of a step begin with the first one's plan") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7960);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t dim : {64, 128, 256})
      for (int round = 0; round < 4; ++round) {
        std::vector<Lengths> lengths;
        const int64_t count = pick<int64_t>(engine, {1, 2, 9, 33, 400});
        const int64_t longest = 30'000 / count;
        for (int64_t s = 0; s < count; ++s)
          lengths.push_back({static_cast<int32_t>(draw(engine, 1, count > 9 ? 1 : 4)),
                             static_cast<int32_t>(draw(engine, 4, std::max<int64_t>(longest, 5)))});
        AttendCase first = layer_of(format, dim, lengths, engine);
        AttendCase second = layer_of(format, dim, lengths, engine);
        for (AttendCase* one : {&first, &second}) one->params.window_left = round == 3 ? 100 : -1;
        check_layers(first, second, plan,
                     std::string(name(format)) + ", dim " + std::to_string(dim) + ", " +
                         std::to_string(count) + " sequences");
      }
}

TEST_CASE("layers share a plan of 16 columns at once") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7964);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t dim : {64, 128}) {
      std::vector<Lengths> lengths;
      for (int s = 0; s < 5; ++s)
        lengths.push_back({4, static_cast<int32_t>(draw(engine, 4, 2000))});
      AttendCase first = layer_of(format, dim, lengths, engine);
      AttendCase second = layer_of(format, dim, lengths, engine);
      check_results(second, check_layers(first, second, plan, "16 columns"), "16 columns");
    }
}

TEST_CASE("layers share a plan of a shard") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7965);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  const std::vector<Lengths> lengths = {{1, 900}, {3, 17}, {1, 4000}, {2, 64}};
  for (const ContextShard& shard :
       {ContextShard{2, 0, 16}, ContextShard{2, 1, 16}, ContextShard{3, 2, 1}})
    for (const int32_t window : {-1, 100}) {
      AttendCase first = layer_of(KvFormat::kNvfp4, 128, lengths, engine, 8, 2, shard);
      AttendCase second = layer_of(KvFormat::kNvfp4, 128, lengths, engine, 8, 2, shard);
      for (AttendCase* one : {&first, &second}) one->params.window_left = window;
      const std::string what = "rank " + std::to_string(shard.rank);
      check_results(second, check_layers(first, second, plan, what), what);
    }
}

TEST_CASE("a plan covers rows that no sequence does, and calls without sequences") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7966);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  for (const std::vector<Lengths>& lengths :
       {std::vector<Lengths>{}, {{1, 900}, {0, 40}, {2, 3000}}}) {
    AttendCase one = layer_of(KvFormat::kNvfp4, 128, lengths, engine);
    const auto covered = static_cast<size_t>(one.num_rows * one.num_q_heads);
    Outputs expected;
    if (covered > 0) expected = one.run_cpu();
    add_uncovered_rows(one, 11);
    expected.out.resize(11 * 8 * 128 * 4, std::byte{0});
    expected.lse.resize(11 * 8, -INFINITY);
    for (const Use use : {Use::kNone, Use::kMake, Use::kTake}) {
      SharingRun run = run_sharing(one, plan, use);
      CHECK(run.faults == 0);
      check_results(one, std::move(run.outputs), expected,
                    std::to_string(lengths.size()) + " sequences and rows past them");
    }
  }
}

// 512 segments, which 128 CTAs of 132 take whole where lengths are alike.
TEST_CASE("a plan serves where CTAs take whole segments") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7967);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  for (const bool is_alike : {true, false}) {
    std::vector<Lengths> lengths(64, {1, 700});
    if (!is_alike)
      for (Lengths& one : lengths) one.seq_len = static_cast<int32_t>(draw(engine, 1, 700));
    AttendCase first = layer_of(KvFormat::kNvfp4, 64, lengths, engine, 8, 8);
    AttendCase second = layer_of(KvFormat::kNvfp4, 64, lengths, engine, 8, 8);
    const std::string what = is_alike ? "lengths alike" : "lengths not alike";
    check_results(second, check_layers(first, second, plan, what), what);
  }
}

TEST_CASE("a plan of other shapes is not taken, nor is memory without one") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7961);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  const std::vector<Lengths> lengths = {{1, 900}, {1, 17}, {1, 4000}};
  AttendCase one = layer_of(KvFormat::kNvfp4, 128, lengths, engine);
  const SharingRun expected = run_sharing(one, plan, Use::kNone);
  check_same(run_sharing(one, plan, Use::kTake), expected, "memory that holds no plan");
  AttendCase of_dim = layer_of(KvFormat::kNvfp4, 64, lengths, engine);
  AttendCase of_rows = layer_of(KvFormat::kNvfp4, 128, {{2, 900}, {1, 17}, {1, 4000}}, engine);
  AttendCase of_table = layer_of(KvFormat::kNvfp4, 128, {{1, 900}, {1, 17}, {1, 7000}}, engine);
  AttendCase of_window = one;
  of_window.params.window_left = 63;
  for (AttendCase* other : {&of_dim, &of_rows, &of_table, &of_window}) {
    run_sharing(*other, plan, Use::kMake);
    check_same(run_sharing(one, plan, Use::kTake), expected, "a plan of another shape");
  }
}

// Rows of the first sequence see up to 33 tokens less than the last one does.
TEST_CASE("a plan that differs in causality, heads or the rank alone is not taken") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7968);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  const std::vector<Lengths> lengths = {{33, 900}, {1, 17}, {1, 4000}};
  std::vector<AttendCase> cases;
  cases.push_back(layer_of(KvFormat::kNvfp4, 128, lengths, engine));
  cases.push_back(cases[0]);
  cases.back().params.causal = false;
  cases.push_back(layer_of(KvFormat::kNvfp4, 128, lengths, engine, 4));
  cases.push_back(layer_of(KvFormat::kNvfp4, 128, lengths, engine, 8, 4));
  for (const int32_t rank : {0, 1})
    cases.push_back(layer_of(KvFormat::kNvfp4, 128, lengths, engine, 8, 2, {2, rank, 16}));
  for (AttendCase& taker : cases) {
    const SharingRun expected = run_sharing(taker, plan, Use::kNone);
    for (AttendCase& maker : cases) {
      run_sharing(maker, plan, Use::kMake);
      check_same(run_sharing(taker, plan, Use::kTake), expected, "the plan of a call like it");
    }
  }
}

TEST_CASE("calls that cannot share a plan leave it alone, or none where they were to make one") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7962);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  AttendCase usual = layer_of(KvFormat::kNvfp4, 128, {{1, 900}, {1, 17}}, engine);
  AttendCase shorter = usual, deterministic = usual, split = usual, masked = usual;
  shorter.seq_lens = {80, 9};
  deterministic.params.deterministic = true;
  split.params.num_splits = 3;
  masked.set_random_mask(engine);
  AttendCase empty = layer_of(KvFormat::kNvfp4, 128, {{0, 30}}, engine);
  const SharingRun of_shorter = run_sharing(shorter, plan, Use::kNone);
  const auto check = [&](AttendCase& one, std::string_view row) {
    const SharingRun expected = run_sharing(one, plan, Use::kNone, row);
    run_sharing(usual, plan, Use::kMake);
    auto made = plan.read<std::byte>();
    REQUIRE(key_of(plan) != 0);
    check_same(run_sharing(one, plan, Use::kTake, row), expected, "taken");
    CHECK(plan.read<std::byte>() == made);
    check_same(run_sharing(one, plan, Use::kMake, row), expected, "made");
    std::fill_n(made.begin(), sizeof(uint64_t), std::byte{0});
    CHECK(plan.read<std::byte>() == made);
    check_same(run_sharing(shorter, plan, Use::kTake), of_shorter, "other lengths since");
  };
  for (AttendCase* one : {&deterministic, &split, &masked, &empty}) check(*one, kTunedAttend);
  for (AttendCase* one : {&usual, &empty}) check(*one, "cuda_attend");
}

TEST_CASE("a plan that the caller of a request names is not touched") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7969);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  const auto before = plan.read<std::byte>();
  AttendCase one = layer_of(KvFormat::kNvfp4, 128, {{1, 900}, {1, 17}}, engine);
  const DeviceBytes words(
      std::vector<uint64_t>(static_cast<size_t>(one.params.layer.num_blocks), 8));
  const kernels::BlockRights rights = {words.data<uint64_t>(), 8, 9};
  AttendCase deterministic = one;
  deterministic.params.deterministic = true;
  for (const std::string_view row : {kTunedAttend, std::string_view("cuda_attend")})
    for (AttendCase* call : {&one, &deterministic})
      for (const Use use : {Use::kMake, Use::kTake})
        CHECK(run_sharing(*call, plan, use, row, &rights).faults == 0);
  CHECK(plan.read<std::byte>() == before);
}

// Lengths that have changed since: nothing but the results suffers.
TEST_CASE("a plan of other lengths reads nothing that the call could not read") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7963);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  AttendCase one = layer_of(KvFormat::kNvfp4, 128, {{1, 3000}, {1, 40}, {1, 4000}}, engine);
  const SharingRun expected = run_sharing(one, plan, Use::kNone);
  AttendCase other = one;
  other.seq_lens = {4000, 4000, 1};
  for (AttendCase* made_by : {&one, &other}) {
    run_sharing(*made_by, plan, Use::kMake);
    run_sharing(one, plan, Use::kTake);
    run_sharing(other, plan, Use::kTake);
  }
  run_sharing(one, plan, Use::kMake);
  check_same(run_sharing(one, plan, Use::kTake), expected, "made anew");
}

}  // namespace
}  // namespace larder::test
