// Calls in process on the engine's stream: graphs that follow tables, lengths and values on the
// device, pools that grow under them, and the same results as on host memory.
#include <cmath>
#include <random>

#include "tests/gpu/gpu_node.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr int kHeads = 2, kQueryHeads = 8, kDim = 64, kBlockTokens = 16, kBlocks = 12;

PoolOptions pool_options(const std::string& name, const std::string& device) {
  PoolOptions options = small_pool(name, Execution::kInProcess, KvFormat::kNvfp4, kBlocks);
  options.geometry.num_kv_heads = kHeads;
  options.key_transform = KeyTransform::kRotated;
  options.device = device;
  return options;
}

std::vector<float> normal(std::mt19937_64& engine, int64_t count) {
  std::normal_distribution<float> values;
  std::vector<float> result(static_cast<size_t>(count));
  for (float& value : result) value = values(engine);
  return result;
}

// One sequence's append and decode step, as a graph; beside it the same on host memory.
struct Step {
  explicit Step(Node& node)
      : client(node.connect()),
        gpu(must(client.open_pool(pool_options("gpu", "auto")))),
        host(must(client.open_pool(pool_options("host", "host")))),
        k(kHeads * kDim * sizeof(float)),
        v(kHeads * kDim * sizeof(float)),
        q(kQueryHeads * kDim * sizeof(float)),
        out(kQueryHeads * kDim * sizeof(float)),
        slot(sizeof(int64_t)),
        seq_len(sizeof(int32_t)),
        q_len(std::vector<int32_t>{1}),
        table(kBlocks * sizeof(int32_t)) {
    (void)must(gpu.allocate(kBlocks));
    (void)must(host.allocate(kBlocks));
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  }

  void enqueue() {
    must(gpu.append_in_stream(0, dense_tensor(k.data<float>(), Dtype::kFp32, 1, kHeads, kDim),
                              dense_tensor(v.data<float>(), Dtype::kFp32, 1, kHeads, kDim),
                              slot.data<int64_t>(), 1, stream));
    must(gpu.attend_in_stream(0, batch(), {}, stream));
  }
  DeviceAttendBatch batch() const {
    DeviceAttendBatch batch;
    batch.q = dense_tensor(q.data<float>(), Dtype::kFp32, 1, kQueryHeads, kDim);
    batch.out = dense_tensor(out.data<float>(), Dtype::kFp32, 1, kQueryHeads, kDim);
    batch.q_lens = q_len.data<int32_t>();
    batch.seq_lens = seq_len.data<int32_t>();
    batch.block_table = table.data<int32_t>();
    batch.num_seqs = 1;
    batch.block_table_stride = kBlocks;
    return batch;
  }

  Client client;
  Pool gpu, host;
  DeviceBytes k, v, q, out, slot, seq_len, q_len, table;
  cudaStream_t stream = nullptr;
};

template <typename T>
void put(const DeviceBytes& to, const std::vector<T>& values) {
  REQUIRE(cudaMemcpy(to.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) ==
          cudaSuccess);
}

// Token `token` of a sequence over a shuffled block table, on both memories.
void replay_token(Step& step, cudaGraphExec_t graph, std::mt19937_64& engine, int32_t token,
                  const std::vector<int32_t>& table) {
  std::vector<float> k = normal(engine, kHeads * kDim), v = normal(engine, kHeads * kDim);
  std::vector<float> q = normal(engine, kQueryHeads * kDim), wanted(kQueryHeads * kDim);
  const int64_t slot = int64_t{table[static_cast<size_t>(token / kBlockTokens)]} * kBlockTokens +
                       token % kBlockTokens;
  put(step.k, k);
  put(step.v, v);
  put(step.q, q);
  put(step.slot, std::vector<int64_t>{slot});
  put(step.seq_len, std::vector<int32_t>{token + 1});
  put(step.table, table);
  REQUIRE(cudaMemset(step.out.data(), 0xFF, step.out.size()) == cudaSuccess);
  REQUIRE(cudaGraphLaunch(graph, step.stream) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(step.stream) == cudaSuccess);
  must(step.host.append(0, dense_tensor(k.data(), Dtype::kFp32, 1, kHeads, kDim),
                        dense_tensor(v.data(), Dtype::kFp32, 1, kHeads, kDim), {&slot, 1}));
  const int32_t one = 1, length = token + 1;
  AttendBatch batch;
  batch.q = dense_tensor(q.data(), Dtype::kFp32, 1, kQueryHeads, kDim);
  batch.out = dense_tensor(wanted.data(), Dtype::kFp32, 1, kQueryHeads, kDim);
  batch.q_lens = {&one, 1};
  batch.seq_lens = {&length, 1};
  batch.block_table = table;
  batch.block_table_stride = kBlocks;
  must(step.host.attend(0, batch));
  const std::vector<float> got = step.out.read<float>();
  double error = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  CHECK(std::sqrt(error / norm) < 1e-4);  // false for a NaN too
}

TEST_CASE("one graph of append and attend follows tables, lengths and values on the device") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Step step(node);
  auto engine = random_engine(1);
  put(step.slot, std::vector<int64_t>{-1});
  put(step.seq_len, std::vector<int32_t>{0});
  put(step.table, std::vector<int32_t>(kBlocks, 0));
  step.enqueue();  // the workspace is there from now on
  REQUIRE(cudaStreamSynchronize(step.stream) == cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaStreamBeginCapture(step.stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  step.enqueue();
  REQUIRE(cudaStreamEndCapture(step.stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  std::vector<int32_t> table(kBlocks);
  for (int32_t i = 0; i < kBlocks; ++i) table[static_cast<size_t>(i)] = i;
  std::shuffle(table.begin(), table.end(), engine);
  for (int32_t token = 0; token < kBlocks * kBlockTokens; ++token)
    replay_token(step, executable, engine, token, table);
  // What lies in both pools is the same, byte for byte.
  CHECK(must(step.gpu.checksum(table)) == must(step.host.checksum(table)));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_CASE("a call begins with the plan that the one before it has left") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Step step(node);
  auto engine = random_engine(3);
  std::vector<int32_t> table(kBlocks);
  for (int32_t i = 0; i < kBlocks; ++i) table[static_cast<size_t>(i)] = i;
  put(step.table, table);
  for (int64_t token = 0; token < 100; ++token) {
    put(step.k, normal(engine, kHeads * kDim));
    put(step.v, normal(engine, kHeads * kDim));
    put(step.slot, std::vector<int64_t>{token});
    put(step.seq_len, std::vector<int32_t>{static_cast<int32_t>(token) + 1});
    step.enqueue();
    REQUIRE(cudaStreamSynchronize(step.stream) == cudaSuccess);
  }
  // As the tuned row takes queries.
  const DeviceBytes q(std::vector<uint16_t>(kQueryHeads * kDim, 0x3F80));  // ones
  const DeviceBytes plan(static_cast<size_t>(kAttendPlanBytes));
  const auto attend = [&](AttendPlan use) {
    const DeviceBytes out(kQueryHeads * kDim * sizeof(uint16_t));
    DeviceAttendBatch batch = step.batch();
    batch.q = dense_tensor(q.data<uint16_t>(), Dtype::kBf16, 1, kQueryHeads, kDim);
    batch.out = dense_tensor(out.data<uint16_t>(), Dtype::kFp16, 1, kQueryHeads, kDim);
    batch.plan = use;
    must(step.gpu.attend_in_stream(0, batch, {}, step.stream));
    REQUIRE(cudaStreamSynchronize(step.stream) == cudaSuccess);
    plan.check_guards();
    return out.read<uint16_t>();
  };
  const auto before = plan.read<std::byte>();
  const std::vector<uint16_t> expected = attend({});
  CHECK(plan.read<std::byte>() == before);
  CHECK(attend({plan.data<std::byte>(), true}) == expected);
  const auto made = plan.read<std::byte>();
  CHECK(made != before);
  CHECK(attend({plan.data<std::byte>(), false}) == expected);
  CHECK(plan.read<std::byte>() == made);
  DeviceAttendBatch batch = step.batch();
  batch.plan = {plan.data<std::byte>() + 8, true};
  CHECK(step.gpu.attend_in_stream(0, batch, {}, step.stream).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("layers of one call are turned, and gathered from a first token, as on host memory") {
  if (!has_gpu()) return;
  constexpr int64_t kTokens = kBlocks * kBlockTokens, kRead = 8;
  Node node(gpu_options());
  Client client = node.connect();
  Pool gpu = must(client.open_pool(pool_options("gpu", "auto")));
  Pool host = must(client.open_pool(pool_options("host", "host")));
  (void)must(gpu.allocate(kBlocks));
  (void)must(host.allocate(kBlocks));
  auto engine = random_engine(2);
  std::vector<int32_t> table, slots32;
  std::vector<int64_t> slots, positions;
  for (int32_t i = 0; i < kBlocks; ++i) table.push_back(i);
  std::shuffle(table.begin(), table.end(), engine);
  for (int32_t token = 0; token < kTokens; ++token) {
    slots32.push_back(table[static_cast<size_t>(token / kBlockTokens)] * kBlockTokens +
                      token % kBlockTokens);
    slots.push_back(slots32.back());
    positions.push_back(100'000 + token);
  }
  const auto view = [](float* values, int64_t rows) {
    return dense_tensor(values, Dtype::kFp32, rows, kHeads, kDim);
  };
  AppendOptions options;
  options.rope.dim = kDim;
  options.rope.positions = positions.data();
  std::vector<DeviceBytes> memory;
  std::vector<LayerRows> layers;
  for (int32_t layer = 0; layer < 2; ++layer) {
    std::vector<float> k = normal(engine, kTokens * kHeads * kDim);
    std::vector<float> v = normal(engine, kTokens * kHeads * kDim);
    must(host.append(layer, view(k.data(), kTokens), view(v.data(), kTokens), slots, options));
    memory.emplace_back(k);
    memory.emplace_back(v);
    layers.push_back({layer, view(memory[memory.size() - 2].data<float>(), kTokens),
                      view(memory.back().data<float>(), kTokens)});
  }
  const DeviceBytes device_slots(slots32), device_positions(positions);
  DeviceAppendBatch batch;
  batch.slots32 = device_slots.data<int32_t>();
  batch.num_slots = kTokens;
  batch.rope.dim = kDim;
  batch.rope.positions = device_positions.data<int64_t>();
  must(gpu.append_layers_in_stream(layers, batch, nullptr));
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(must(gpu.checksum(table)) == must(host.checksum(table)));

  const std::vector<int32_t> seq_lens = {kTokens}, first_tokens = {kTokens - kRead};
  std::vector<float> wanted(kRead * kHeads * kDim);
  GatherBatch on_host;
  on_host.k_out = view(wanted.data(), kRead);
  on_host.seq_lens = seq_lens;
  on_host.first_tokens = first_tokens;
  on_host.block_table = table;
  on_host.block_table_stride = kBlocks;
  must(host.gather(1, on_host));
  const DeviceBytes out(wanted.size() * sizeof(float)), device_table(table);
  const DeviceBytes device_lens(seq_lens), device_firsts(first_tokens);
  DeviceGatherBatch on_device;
  on_device.k_out = view(out.data<float>(), kRead);
  on_device.seq_lens = device_lens.data<int32_t>();
  on_device.first_tokens = device_firsts.data<int32_t>();
  on_device.block_table = device_table.data<int32_t>();
  on_device.num_seqs = 1;
  on_device.block_table_stride = kBlocks;
  must(gpu.gather_in_stream(1, on_device, nullptr));
  CHECK(out.read<float>() == wanted);

  layers[1].k.strides[0] *= 2;
  const Status unlike = gpu.append_layers_in_stream(layers, batch, nullptr);
  CHECK(unlike.code() == ErrorCode::kInvalidArgument);
  CHECK(unlike.message().find("k of layer 1 is not as that of layer 0") != std::string::npos);
}

TEST_CASE("calls in a stream are refused where there is none, by name") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  Pool host = must(client.open_pool(pool_options("host", "host")));
  float* nothing = nullptr;
  const TensorView none = dense_tensor(nothing, Dtype::kFp32, 0, kHeads, kDim);
  CHECK(host.append_in_stream(0, none, none, nullptr, 0, nullptr).code() ==
        ErrorCode::kUnsupported);
  PoolOptions elsewhere = pool_options("nowhere", "GPU-00000000-0000-0000-0000-000000000001");
  const Status status = client.open_pool(elsewhere).status();
  CHECK(status.code() == ErrorCode::kNotFound);
  CHECK(status.message().find("GPU-") != std::string::npos);
}

TEST_CASE("a captured graph reads the same bytes after the pool has grown and another has shrunk") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  PoolOptions options = byte_pool("grows", 8, Execution::kInProcess);
  options.max_blocks = 64;
  options.segment_bytes = int64_t{16} << 20;
  Pool pool = must(client.open_pool(options));
  options.name = "shrinks";
  options.num_blocks = 64;
  options.max_blocks = 128;
  Pool other = must(client.open_pool(options));
  const std::vector<BlockHandle> blocks = must(pool.allocate(8));
  std::vector<int32_t> ids;
  for (const BlockHandle& block : blocks) ids.push_back(block.id);
  std::vector<std::byte> bytes(ids.size() * static_cast<size_t>(pool.page_bytes()));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 131 >> 8);
  must(pool.write_pages(0, ids, bytes));
  const auto page = static_cast<size_t>(pool.page_bytes());
  std::byte* const base = must(pool.data());
  DeviceBytes copy(page);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  REQUIRE(cudaMemcpyAsync(copy.data(), base + ids[3] * pool.block_stride_bytes(), page,
                          cudaMemcpyDeviceToDevice, stream) == cudaSuccess);
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  CHECK(must(pool.resize(64)).blocks_after == 64);
  CHECK(must(other.resize(8)).blocks_after == 8);
  (void)must(pool.allocate(40));
  CHECK(must(pool.data()) == base);
  REQUIRE(cudaGraphLaunch(executable, stream) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  const std::vector<std::byte> got = copy.read();
  CHECK(std::equal(got.begin(), got.end(), bytes.begin() + static_cast<std::ptrdiff_t>(3 * page)));
}

}  // namespace
}  // namespace larder::test
