// What the tests of plans that calls share work with: a call of one row of the table that makes a
// plan, takes one, or plans for itself.
#pragma once

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {

enum class Use { kNone, kMake, kTake };

inline const kernels::Kernel<kernels::AttendParams>& attend_row(std::string_view name) {
  for (const auto& row : kernels::attend_kernels())
    if (row.name == name) return row;
  FAIL("no row of that name");
  std::abort();
}

struct SharingRun {
  Outputs outputs;
  uint32_t faults = 0;
};

inline SharingRun run_sharing(AttendCase& one, const DeviceBytes& plan, Use use,
                              std::string_view name = kTunedAttend,
                              const kernels::BlockRights* rights = nullptr) {
  Uploads uploads;
  const DeviceOutputs outputs(poisoned(one.output()));
  kernels::AttendParams params = one.call(uploads);
  outputs.point(params.output);
  if (use != Use::kNone) params.plan = {plan.data(), use == Use::kMake};
  const auto& row = attend_row(name);
  REQUIRE(row.supports(params).ok());
  const int64_t bytes = row.workspace_bytes(params);
  const DeviceBytes workspace(static_cast<size_t>(bytes));
  kernels::Target target;
  target.backend = kernels::Backend::kCuda;
  target.rights = rights;
  target.workspace = workspace.data();
  target.workspace_bytes = bytes;
  target.faults = outputs.faults.data<kernels::CallFaults>();
  check_ok(row.launch(params, target));
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  workspace.check_guards();
  plan.check_guards();
  return {outputs.read(), outputs.fault_count()};
}

// Of the output, then of the LSEs.
inline std::vector<std::byte> bytes_of(const Outputs& outputs) {
  std::vector<std::byte> bytes = outputs.out;
  const auto* lse = reinterpret_cast<const std::byte*>(outputs.lse.data());
  bytes.insert(bytes.end(), lse, lse + 4 * outputs.lse.size());
  return bytes;
}

inline void check_same(const SharingRun& got, const SharingRun& expected, const std::string& what) {
  check_same_bits(bytes_of(got.outputs), bytes_of(expected.outputs), what);
  CHECK_MESSAGE(got.faults == expected.faults, what);
}

// The first layer makes a plan, then takes it, and the second one takes it too: the bits are those
// of calls that plan for themselves. Returns what the second one gave.
inline Outputs check_layers(AttendCase& first, AttendCase& second, const DeviceBytes& plan,
                            const std::string& what) {
  const SharingRun alone = run_sharing(first, plan, Use::kNone);
  check_same(run_sharing(first, plan, Use::kMake), alone, what + ", made");
  check_same(run_sharing(first, plan, Use::kTake), alone, what + ", taken");
  SharingRun taken = run_sharing(second, plan, Use::kTake);
  check_same(taken, run_sharing(second, plan, Use::kNone), what + ", taken by another layer");
  return std::move(taken.outputs);
}
// And they are the CPU's results.
inline void check_results(AttendCase& one, Outputs got, const Outputs& expected,
                          const std::string& what) {
  one.compare(AttendCase::CudaRun{kTunedAttend, std::move(got), 0}, expected, what);
}
inline void check_results(AttendCase& one, Outputs got, const std::string& what) {
  check_results(one, std::move(got), one.run_cpu(), what);
}

inline AttendCase layer_of(KvFormat format, int32_t dim, const std::vector<Lengths>& lengths,
                           std::mt19937_64& engine, int64_t heads = 8, int32_t kv_heads = 2,
                           const ContextShard& shard = {}) {
  return {decode_geometry(format, kv_heads, 16, dim), heads, lengths, engine, 0, shard};
}

// Gives the call `rows` rows in all, of which no sequence covers the last ones.
inline void add_uncovered_rows(AttendCase& one, int64_t rows) {
  one.num_rows = one.q_view.shape[0] = rows;
  one.q.resize(view_bytes(one.q_view), std::byte{0xFF});
}

// A stream, and once `enqueue` has been captured there, the graph that stands for it from then on.
class Replayed {
 public:
  Replayed() { REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess); }
  Replayed(const Replayed&) = delete;
  Replayed& operator=(const Replayed&) = delete;
  ~Replayed() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
  }

  cudaStream_t stream() const { return stream_; }
  template <typename Enqueue>
  void capture(const Enqueue& enqueue) {
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    enqueue();
    REQUIRE(cudaStreamEndCapture(stream_, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&graph_, graph, 0) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  }
  // To its end.
  template <typename Enqueue>
  void run(const Enqueue& enqueue) {
    if (graph_ != nullptr)
      CHECK(cudaGraphLaunch(graph_, stream_) == cudaSuccess);
    else
      enqueue();
    CHECK(cudaStreamSynchronize(stream_) == cudaSuccess);
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

inline DeviceBytes plan_memory() { return DeviceBytes(static_cast<size_t>(kAttendPlanBytes)); }

}  // namespace larder::test
