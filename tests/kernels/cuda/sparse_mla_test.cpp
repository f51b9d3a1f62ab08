// sparse_mla on a GPU: lists of every shape, lists that nobody has checked, captured launches.
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/outputs.h"
#include "tests/kernels/cuda/stored_rows.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr MlaRow kMlaRows[] = {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16};

// Every block is filled but the last, which is NaN and which no list names.
struct SparseCase {
  SparseCase(MlaRow row, int32_t block_tokens, int64_t blocks, int64_t num_rows, int64_t num_heads,
             int64_t num_entries, std::mt19937_64& engine)
      : rows(num_rows), heads(num_heads), top_k(num_entries) {
    layer.geometry = mla_geometry(1, block_tokens, row);
    layer.page = page_layout(layer.geometry);
    layer.block_stride_bytes = layer.page.page_bytes + 4;
    layer.num_blocks = blocks + 1;
    layer.k_scale = 0.5f;
    pool.assign(static_cast<size_t>(layer.num_blocks * layer.block_stride_bytes), std::byte{0xFF});
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t token = 0; token < block_tokens; ++token)
        fill_row(stored_bytes(layer, pool.data() + block * layer.block_stride_bytes, token, true),
                 engine);
    for (int64_t i = 0; i < rows * top_k; ++i)
      indices.push_back(
          static_cast<int32_t>(engine() % static_cast<uint64_t>(blocks * block_tokens)));
    set_queries(Dtype::kBf16, Layout::kDense, engine);
  }

  void set_queries(Dtype dtype, Layout layout, std::mt19937_64& engine) {
    q_view = view_of(nullptr, dtype, layout, rows, heads, 576);
    q.assign(view_bytes(q_view), std::byte{0xFF});
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t i = 0; i < 576; ++i)
          put_value(q, dtype,
                    row * q_view.strides[0] + head * q_view.strides[1] + i * q_view.strides[2],
                    normal(engine));
  }
  // Some entries that are ignored, and lists of different lengths.
  void make_ragged(std::mt19937_64& engine) {
    const int64_t slots = layer.num_blocks * layer.geometry.block_tokens;
    const int32_t ignored[] = {-1, std::numeric_limits<int32_t>::min(),
                               std::numeric_limits<int32_t>::max(), static_cast<int32_t>(slots)};
    for (int32_t& index : indices)
      if (engine() % 4 == 0) index = ignored[engine() % 4];
    topk_lens.clear();
    for (int64_t row = 0; row < rows; ++row)
      topk_lens.push_back(static_cast<int32_t>(engine() % static_cast<uint64_t>(top_k + 1)));
  }

  kernels::AttentionOutput output() const { return output_of(spec, rows, heads, 512); }

  template <typename Place>
  kernels::SparseMlaParams call(Place&& place) {
    kernels::SparseMlaParams params;
    params.layer = layer;
    params.layer.base = place(pool);
    params.q = q_view;
    params.q.data = place(q);
    params.output = output();
    params.indices = place(indices);
    params.top_k = top_k;
    params.topk_lens = place(topk_lens);
    params.scale = 1.0f / 24;
    params.sinks = place(sinks);
    return params;
  }

  Outputs run_cpu() {
    Outputs host = poisoned(output());
    kernels::SparseMlaParams params =
        call([](auto& values) { return values.empty() ? nullptr : values.data(); });
    point_to(params.output, host.out.data(), host.lse.data(), host.sf.data());
    const Status status = kernels::run_sparse_mla(params);
    CHECK_MESSAGE(status.ok(), status.to_string());
    return host;
  }

  struct CudaRun {
    Outputs outputs;
    uint32_t fault_count;
  };
  CudaRun run_cuda(const kernels::BlockRights* rights = nullptr) {
    INFO(describe());
    Uploads uploads;
    const DeviceOutputs device(poisoned(output()));
    kernels::SparseMlaParams params = call(uploads);
    device.point(params.output);
    const auto bytes = kernels::sparse_mla_workspace_bytes(params, kernels::Backend::kCuda);
    REQUIRE(bytes.ok());
    const DeviceBytes workspace(static_cast<size_t>(*bytes));
    const Status status =
        kernels::run_sparse_mla(params, {kernels::Backend::kCuda, nullptr, workspace.data(), *bytes,
                                         rights, device.faults.data<kernels::CallFaults>()});
    CHECK_MESSAGE(status.ok(), status.to_string());
    CudaRun run = {device.read(), device.fault_count()};
    workspace.check_guards();
    uploads.check_guards();
    return run;
  }

  void check(const std::string& what) {
    const Outputs expected = run_cpu();
    const CudaRun run = run_cuda();
    compare_outputs(output(), expected, run.outputs, what + ": " + describe());
    INFO(what);
    CHECK(run.fault_count == 0);
  }

  std::string describe() const {
    std::ostringstream text;
    text << "sparse_mla " << name(layer.geometry.mla_row) << " block "
         << layer.geometry.block_tokens << " rows " << rows << " heads " << heads << " top_k "
         << top_k << " q " << name(q_view.dtype) << " out " << name(spec.dtype) << " layout "
         << static_cast<int>(spec.layout) << " lens " << !topk_lens.empty() << " sinks "
         << !sinks.empty();
    return text.str();
  }

  int64_t rows, heads, top_k;
  kernels::LayerView layer;
  OutputSpec spec;
  TensorView q_view;
  std::vector<std::byte> pool, q;
  std::vector<int32_t> indices, topk_lens;
  std::vector<float> sinks;
};

TEST_CASE("sparse_mla: lists of every length, format and number of heads") {
  if (!has_gpu()) return;
  auto engine = random_engine(7400);
  CAPTURE(seed());
  size_t turn = 0;
  for (const int64_t heads : {1, 16, 20, 128})
    for (const int64_t top_k : {1, 31, 33, 512, 2048}) {
      SparseCase one(kMlaRows[turn % 4], turn % 3 == 0 ? 1 : 64, 40, turn % 2 == 0 ? 1 : 3, heads,
                     top_k, engine);
      ++turn;
      one.check("full");
      one.make_ragged(engine);
      one.check("ragged");
    }
}

TEST_CASE("sparse_mla: every output dtype, layout and LSE form, sinks and query dtypes") {
  if (!has_gpu()) return;
  auto engine = random_engine(7401);
  CAPTURE(seed());
  constexpr Layout kLayouts[] = {Layout::kDense, Layout::kHeadsFirst, Layout::kGaps};
  for (int round = 0; round < 60; ++round) {
    SparseCase one(kMlaRows[round % 4], 16, 20, static_cast<int64_t>(1 + engine() % 30),
                   static_cast<int64_t>(1 + engine() % 40),
                   static_cast<int64_t>(1 + engine() % 300), engine);
    one.set_queries(static_cast<Dtype>(engine() % 3), kLayouts[engine() % 3], engine);
    one.spec.dtype = static_cast<Dtype>(round % 5);
    one.spec.layout = kLayouts[engine() % 3];
    one.spec.lse_form = {engine() % 2 == 0, engine() % 2 == 0, engine() % 2 == 0};
    one.spec.out_sf_first_row = static_cast<int64_t>(engine() % 150);
    if (engine() % 2 == 0) one.sinks = normals(one.heads, engine);
    if (engine() % 2 == 0) one.make_ragged(engine);
    one.check("mixed");
  }
}

TEST_CASE("sparse_mla: no rows, and lists without an entry") {
  if (!has_gpu()) return;
  auto engine = random_engine(7402);
  CAPTURE(seed());
  for (const int64_t rows : {0, 2})
    for (const int64_t top_k : {0, 40}) {
      SparseCase one(MlaRow::kFp8, 16, 4, rows, 3, top_k, engine);
      one.sinks = normals(3, engine);
      one.check("empty");
      one.spec.lse_form.includes_sink = true;
      std::fill(one.indices.begin(), one.indices.end(), -1);
      one.check("all ignored");
    }
}

TEST_CASE(
    "sparse_mla: a token named twice counts twice, and a NaN shows in the rows that name it") {
  if (!has_gpu()) return;
  auto engine = random_engine(7403);
  CAPTURE(seed());
  SparseCase one(MlaRow::kBf16, 16, 4, 4, 5, 50, engine);
  for (size_t i = 0; i < 50; ++i) one.indices[i] = 3;
  for (size_t i = 50; i < 90; ++i) one.indices[i] = static_cast<int32_t>(4 + i % 2);
  // Only the last row names slot 60.
  for (int32_t& index : one.indices) index = index == 60 ? 61 : index;
  one.indices.back() = 60;
  put_half(
      stored_bytes(one.layer, one.pool.data() + 3 * one.layer.block_stride_bytes, 12, true).data +
          8,
      0x7FC0);
  one.check("repeated");
}

TEST_CASE("sparse_mla: lengths past the list are cut, and blocks without the right not seen") {
  if (!has_gpu()) return;
  auto engine = random_engine(7404);
  CAPTURE(seed());
  SparseCase one(MlaRow::kNvfp4Ds, 16, 10, 3, 16, 100, engine);
  one.topk_lens = {60, 100, 0};
  const Outputs expected = one.run_cpu();
  for (const int32_t wrong : {101, std::numeric_limits<int32_t>::max()}) {
    SparseCase wild = one;
    wild.topk_lens[1] = wrong;
    const SparseCase::CudaRun run = wild.run_cuda();
    compare_outputs(one.output(), expected, run.outputs, "too long");
    CHECK(run.fault_count > 0);
  }
  for (const int32_t wrong : {-1, std::numeric_limits<int32_t>::min()}) {
    SparseCase wild = one;
    wild.topk_lens[2] = wrong;
    const SparseCase::CudaRun run = wild.run_cuda();
    compare_outputs(one.output(), expected, run.outputs, "negative");
    CHECK(run.fault_count > 0);
  }
  std::vector<uint64_t> words(static_cast<size_t>(one.layer.num_blocks), 5);
  words[2] = 6;
  words[3] = 0;
  const DeviceBytes device(words);
  const kernels::BlockRights rights = {device.data<uint64_t>(), 5, 6};
  SparseCase hidden = one;
  for (int32_t& index : hidden.indices) index = index / 16 == 3 ? -1 : index;
  const SparseCase::CudaRun run = one.run_cuda(&rights);
  compare_outputs(one.output(), hidden.run_cpu(), run.outputs, "rights");
  CHECK(run.fault_count > 0);
}

TEST_CASE("sparse_mla: a captured call follows lists and stored values") {
  if (!has_gpu()) return;
  auto engine = random_engine(7405);
  CAPTURE(seed());
  SparseCase first(MlaRow::kFp8Ds, 16, 30, 2, 16, 400, engine);
  SparseCase second(MlaRow::kFp8Ds, 16, 30, 2, 16, 400, engine);
  first.topk_lens = {400, 3};
  second.topk_lens = {17, 399};
  Uploads uploads;
  const DeviceOutputs device(poisoned(first.output()));
  kernels::SparseMlaParams call = first.call(uploads);
  device.point(call.output);
  const auto bytes = kernels::sparse_mla_workspace_bytes(call, kernels::Backend::kCuda);
  REQUIRE(bytes.ok());
  const DeviceBytes workspace(static_cast<size_t>(*bytes));
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  const Status status = kernels::run_sparse_mla(
      call, {kernels::Backend::kCuda, stream, workspace.data(), *bytes, nullptr, nullptr});
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  REQUIRE_MESSAGE(status.ok(), status.to_string());
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  const auto copy = [](const void* target, const auto& values) {
    CHECK(cudaMemcpy(const_cast<void*>(target), values.data(), values.size() * sizeof(values[0]),
                     cudaMemcpyHostToDevice) == cudaSuccess);
  };
  for (SparseCase* one : {&first, &second, &first}) {
    copy(call.layer.base, one->pool);
    copy(call.q.data, one->q);
    copy(call.indices, one->indices);
    copy(call.topk_lens, one->topk_lens);
    CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    compare_outputs(one->output(), one->run_cpu(), device.read(), "graph: " + one->describe());
  }
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("sparse_mla: wild lists touch nothing outside") {
  if (!has_gpu()) return;
  auto engine = random_engine(7406);
  CAPTURE(seed());
  for (int round = 0; round < 50; ++round) {
    SparseCase one(kMlaRows[round % 4], 16, 5, 1 + round % 5, 17, 1 + round * 7, engine);
    one.make_ragged(engine);
    for (int32_t& index : one.indices)
      if (engine() % 3 == 0) index = static_cast<int32_t>(engine());
    for (int32_t& length : one.topk_lens)
      if (engine() % 2 == 0) length = static_cast<int32_t>(engine());
    one.run_cuda();
    const cudaError_t error = cudaDeviceSynchronize();
    REQUIRE_MESSAGE(error == cudaSuccess, cudaGetErrorString(error) << " at " << one.describe());
  }
}

}  // namespace
}  // namespace larder::test
