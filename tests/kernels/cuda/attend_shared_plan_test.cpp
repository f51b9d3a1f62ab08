// Plans that calls of the tuned row share: the results are those of calls that plan for themselves,
// to the bit, since the work is dealt out alike.
#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

enum class Use { kNone, kMake, kTake };

const kernels::Kernel<kernels::AttendParams>& tuned_row() {
  for (const auto& row : kernels::attend_kernels())
    if (row.name == kTunedAttend) return row;
  FAIL("no tuned row");
  std::abort();
}

struct Run {
  std::vector<std::byte> bytes;  // of the output, then of the LSEs
  uint32_t faults;
};

Run run(AttendCase& one, const DeviceBytes& plan, Use use) {
  Uploads uploads;
  const DeviceOutputs outputs(poisoned(one.output()));
  kernels::AttendParams params = one.call(uploads);
  outputs.point(params.output);
  if (use != Use::kNone)
    params.plan = {reinterpret_cast<std::byte*>(plan.data()), use == Use::kMake};
  const auto& row = tuned_row();
  REQUIRE(row.supports(params).ok());
  const int64_t bytes = row.workspace_bytes(params);
  const DeviceBytes workspace(static_cast<size_t>(bytes));
  kernels::Target target;
  target.backend = kernels::Backend::kCuda;
  target.workspace = workspace.data();
  target.workspace_bytes = bytes;
  target.faults = outputs.faults.data<kernels::CallFaults>();
  check_ok(row.launch(params, target));
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  workspace.check_guards();
  plan.check_guards();
  const Outputs got = outputs.read();
  Run result = {got.out, outputs.fault_count()};
  const auto* lse = reinterpret_cast<const std::byte*>(got.lse.data());
  result.bytes.insert(result.bytes.end(), lse, lse + 4 * got.lse.size());
  return result;
}

void check_same(const Run& got, const Run& expected, const std::string& what) {
  check_same_bits(got.bytes, expected.bytes, what);
  CHECK_MESSAGE(got.faults == expected.faults, what);
}

AttendCase decode_case(KvFormat format, int32_t dim, const std::vector<Lengths>& lengths,
                       std::mt19937_64& engine) {
  AttendCase one(decode_geometry(format, 2, 16, dim), 8, lengths, engine);
  one.set_queries(Dtype::kBf16, Layout::kDense, engine);
  return one;
}

DeviceBytes plan_memory() { return DeviceBytes(static_cast<size_t>(kAttendPlanBytes)); }

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
        AttendCase first = decode_case(format, dim, lengths, engine);
        AttendCase second = decode_case(format, dim, lengths, engine);
        for (AttendCase* one : {&first, &second}) one->params.window_left = round == 3 ? 100 : -1;
        const std::string what = std::string(name(format)) + ", dim " + std::to_string(dim) + ", " +
                                 std::to_string(count) + " sequences";
        check_same(run(first, plan, Use::kMake), run(first, plan, Use::kNone), what + ", made");
        check_same(run(first, plan, Use::kTake), run(first, plan, Use::kNone), what + ", taken");
        check_same(run(second, plan, Use::kTake), run(second, plan, Use::kNone),
                   what + ", taken by another layer");
      }
}

TEST_CASE("a plan of other shapes is not taken, nor is memory without one") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7961);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  AttendCase one = decode_case(KvFormat::kNvfp4, 128, {{1, 900}, {1, 17}, {1, 4000}}, engine);
  const Run expected = run(one, plan, Use::kNone);
  check_same(run(one, plan, Use::kTake), expected, "memory that holds no plan");
  AttendCase of_dim = decode_case(KvFormat::kNvfp4, 64, {{1, 900}, {1, 17}, {1, 4000}}, engine);
  AttendCase of_rows = decode_case(KvFormat::kNvfp4, 128, {{2, 900}, {1, 17}, {1, 4000}}, engine);
  AttendCase of_table = decode_case(KvFormat::kNvfp4, 128, {{1, 900}, {1, 17}, {1, 7000}}, engine);
  AttendCase of_window = one;
  of_window.params.window_left = 63;
  for (AttendCase* other : {&of_dim, &of_rows, &of_table, &of_window}) {
    run(*other, plan, Use::kMake);
    check_same(run(one, plan, Use::kTake), expected, "a plan of another shape");
  }
}

TEST_CASE("calls that cannot share a plan leave it alone") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7962);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  const AttendCase usual = decode_case(KvFormat::kNvfp4, 128, {{1, 900}, {1, 17}}, engine);
  AttendCase deterministic = usual, split = usual, masked = usual;
  deterministic.params.deterministic = true;
  split.params.num_splits = 3;
  masked.set_random_mask(engine);
  const auto before = plan.read<std::byte>();
  for (AttendCase* one : {&deterministic, &split, &masked}) {
    const Run expected = run(*one, plan, Use::kNone);
    check_same(run(*one, plan, Use::kMake), expected, "made");
    check_same(run(*one, plan, Use::kTake), expected, "taken");
  }
  CHECK(plan.read<std::byte>() == before);
}

// Lengths that have changed since: nothing but the results suffers.
TEST_CASE("a plan of other lengths reads nothing that the call could not read") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7963);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  AttendCase one = decode_case(KvFormat::kNvfp4, 128, {{1, 3000}, {1, 40}, {1, 4000}}, engine);
  const Run expected = run(one, plan, Use::kNone);
  AttendCase other = one;
  other.seq_lens = {4000, 4000, 1};
  for (AttendCase* made_by : {&one, &other}) {
    run(*made_by, plan, Use::kMake);
    run(one, plan, Use::kTake);
    run(other, plan, Use::kTake);
  }
  run(one, plan, Use::kMake);
  check_same(run(one, plan, Use::kTake), expected, "made anew");
}

}  // namespace
}  // namespace larder::test
