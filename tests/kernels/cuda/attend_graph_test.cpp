// attend on a GPU: a captured call serves other lengths, tables, queries and stored values.
#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

void copy_to(const void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  CHECK(cudaMemcpy(const_cast<void*>(device), host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
}

// One row's launches over device memory of their own, captured in a graph.
class CapturedAttend {
 public:
  CapturedAttend(const kernels::Kernel<kernels::AttendParams>& row, AttendCase& one)
      : outputs_(poisoned(one.output())), call_(one.call(uploads_)) {
    outputs_.point(call_.output);
    const int64_t bytes = row.workspace_bytes == nullptr ? 0 : row.workspace_bytes(call_);
    workspace_.emplace_back(static_cast<size_t>(bytes));
    kernels::Target target;
    target.backend = kernels::Backend::kCuda;
    target.workspace = workspace_[0].data();
    target.workspace_bytes = bytes;
    target.faults = outputs_.faults.data<kernels::CallFaults>();
    REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
    target.stream = stream_;
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    const Status status = row.launch(call_, target);
    REQUIRE(cudaStreamEndCapture(stream_, &graph) == cudaSuccess);
    REQUIRE_MESSAGE(status.ok(), row.name << ": " << status.to_string());
    REQUIRE(cudaGraphInstantiate(&graph_, graph, 0) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  }
  CapturedAttend(const CapturedAttend&) = delete;
  CapturedAttend& operator=(const CapturedAttend&) = delete;
  ~CapturedAttend() {
    cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
  }

  // With the arrays of a call that has the same shapes. The workspace keeps what the last run left.
  Outputs replay(const AttendCase& one) {
    copy_to(call_.layer.base, one.pool.data(), one.pool.size());
    copy_to(call_.q.data, one.q.data(), one.q.size());
    copy_to(call_.q_lens, one.q_lens.data(), one.q_lens.size() * 4);
    copy_to(call_.seq_lens, one.seq_lens.data(), one.seq_lens.size() * 4);
    copy_to(call_.block_table, one.table.data(), one.table.size() * 4);
    copy_to(call_.mask, one.mask.data(), one.mask.size());
    copy_to(call_.mask_offsets, one.mask_offsets.data(), one.mask_offsets.size() * 8);
    CHECK(cudaMemset(outputs_.out.data(), 0xFF, outputs_.out.size()) == cudaSuccess);
    CHECK(cudaMemset(outputs_.lse.data(), 0xFF, outputs_.lse.size()) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaGraphLaunch(graph_, stream_) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream_) == cudaSuccess);
    workspace_[0].check_guards();
    CHECK(outputs_.fault_count() == 0);
    return outputs_.read();
  }

 private:
  Uploads uploads_;
  DeviceOutputs outputs_;
  kernels::AttendParams call_;
  std::vector<DeviceBytes> workspace_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

// Gives calls with as many rows and sequences the shapes that one graph needs.
void make_alike(std::vector<AttendCase>& cases) {
  int64_t blocks = 0, stride = 0;
  size_t pool_bytes = 0, mask_bytes = 0;
  for (const AttendCase& one : cases) {
    REQUIRE(one.num_rows == cases[0].num_rows);
    REQUIRE(one.q_lens.size() == cases[0].q_lens.size());
    blocks = std::max(blocks, one.params.layer.num_blocks);
    stride = std::max(stride, one.params.block_table_stride);
    pool_bytes = std::max(pool_bytes, one.pool.size());
    mask_bytes = std::max(mask_bytes, one.mask.size());
  }
  for (AttendCase& one : cases) {
    std::vector<size_t> all(one.q_lens.size());
    for (size_t s = 0; s < all.size(); ++s) all[s] = s;
    one = take_sequences(one, all, stride - one.params.block_table_stride);
    one.params.layer.num_blocks = blocks;
    one.pool.resize(pool_bytes, std::byte{0xFF});
    if (mask_bytes > 0) one.mask.resize(mask_bytes);
  }
}

bool takes(const kernels::Kernel<kernels::AttendParams>& row, AttendCase& one) {
  Uploads uploads;
  const DeviceOutputs outputs(poisoned(one.output()));
  kernels::AttendParams made = one.call(uploads);
  outputs.point(made.output);
  return row.supports(made).ok();
}

void check_replays(std::vector<AttendCase>& cases, const std::string& what) {
  make_alike(cases);
  std::vector<Outputs> expected;
  for (AttendCase& one : cases) expected.push_back(one.run_cpu());
  std::vector<std::string_view> names;
  for (const auto& row : kernels::attend_kernels()) {
    if (row.backend != kernels::Backend::kCuda || !takes(row, cases[0])) continue;
    names.push_back(row.name);
    CapturedAttend captured(row, cases[0]);
    for (int round = 0; round < 2; ++round)
      for (size_t i = cases.size(); i-- > 0;) {
        Outputs got = captured.replay(cases[i]);
        cases[i].compare(AttendCase::CudaRun{row.name, std::move(got), 0}, expected[i],
                         what + ", replay of call " + std::to_string(i));
      }
  }
  CHECK(has_name(names, "cuda_attend"));
  if (has_attend_row(kTunedAttend)) CHECK(has_name(names, kTunedAttend));
}

AttendCase graph_case(const std::vector<Lengths>& lengths, std::mt19937_64& engine) {
  return {decode_geometry(KvFormat::kNvfp4, 2, 16, 64), 8, lengths, engine};
}

TEST_CASE("a captured call follows lengths, tables and stored values") {
  if (!has_gpu()) return;
  auto engine = random_engine(7950);
  CAPTURE(seed());
  for (const int32_t splits : {0, 1, 4})
    for (const bool deterministic : {false, true}) {
      std::vector<AttendCase> cases;
      cases.push_back(graph_case({{4, 100}, {1, 50}, {0, 30}}, engine));
      cases.push_back(graph_case({{1, 40}, {0, 44}, {4, 3000}}, engine));
      cases.push_back(graph_case({{1, 0}, {1, 1}, {3, 2}}, engine));
      cases.push_back(graph_case({{0, 0}, {5, 33}, {0, 700}}, engine));
      for (AttendCase& one : cases) {
        one.params.num_splits = splits;
        one.params.deterministic = deterministic;
      }
      check_replays(cases, "lengths");
    }
}

TEST_CASE("a captured decode of many sequences serves batches that are short, long and empty") {
  if (!has_gpu()) return;
  auto engine = random_engine(7951);
  CAPTURE(seed());
  for (const int32_t prefix : {0, kFindSharedPrefix}) {
    std::vector<AttendCase> cases;
    for (const int64_t longest : {20, 900, 0, 300}) {
      std::vector<Lengths> lengths;
      for (int s = 0; s < 64; ++s)
        lengths.push_back({1, static_cast<int32_t>(draw(engine, longest / 2, longest))});
      cases.push_back(graph_case(lengths, engine));
      cases.back().params.shared_prefix_tokens = prefix;
    }
    // Other runs of neighbours share a head in each of the calls.
    share_head(cases[1], 3, 30, 20);
    share_head(cases[1], 40, 64, 25);
    share_head(cases[3], 0, 50, 9);
    check_replays(cases, "many sequences");
  }
}

TEST_CASE("a captured call follows masks and where they lie") {
  if (!has_gpu()) return;
  auto engine = random_engine(7952);
  CAPTURE(seed());
  std::vector<AttendCase> cases;
  for (const auto& lengths : {std::vector<Lengths>{{4, 100}, {1, 50}, {3, 30}},
                              {{1, 40}, {6, 444}, {1, 9}},
                              {{8, 5}, {0, 100}, {0, 3}}}) {
    cases.push_back(graph_case(lengths, engine));
    if (cases.size() == 1)
      cases.back().set_random_mask(engine);
    else
      set_tree_mask(cases.back(), engine);
  }
  check_replays(cases, "masks");
}

}  // namespace
}  // namespace larder::test
