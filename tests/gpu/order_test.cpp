// Order between the engine's stream and calls on request (host words), and the engine's own memory
// in those calls.
#include <cmath>
#include <cstring>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "allocator/cuda_vmm.h"
#include "tests/gpu/gpu_node.h"

namespace larder::test {
namespace {

constexpr int kDim = 64;
constexpr int kTokens = 16;
constexpr int64_t kBytes = kTokens * kDim * sizeof(float);

TensorView rows(void* data) {
  return dense_tensor(static_cast<float*>(data), Dtype::kFp32, kTokens, 1, kDim);
}

PoolOptions bf16_pool() { return small_pool("order", Execution::kOnRequest, KvFormat::kBf16, 8); }

// Device memory of this process that was exported as an fd.
struct VmmMemory {
  VmmMemory() {
    auto driver = must(CudaDriver::load());
    const std::string uuid = driver->devices()[0].uuid;
    provider = must(CudaVmmProvider::open(driver, uuid));
    segment = provider->create("order", int64_t{2} << 20);
    range = provider->reserve(segment.size_bytes);
    range->map_at(0, segment.fd.get(), segment.size_bytes);
  }
  MemoryImport import() const {
    MemoryImport memory;
    memory.kind = ImportKind::kVmm;
    memory.base = range->base();
    memory.size_bytes = segment.size_bytes;
    memory.fd = segment.fd.get();
    return memory;
  }
  std::unique_ptr<CudaVmmProvider> provider;
  Segment segment;
  std::unique_ptr<AddressRange> range;
};

TEST_CASE("an append on request sees what the stream wrote before it, and not what comes after") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  REQUIRE(cudaFree(nullptr) == cudaSuccess);
  Client client = node.connect();
  Pool pool = must(client.open_pool(bf16_pool()));
  node.await_ready();
  VmmMemory memory;
  const uint64_t import = must(client.import_memory(memory.import()));
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  must(client.order_after(stream));
  auto* k = reinterpret_cast<float*>(memory.range->base());
  auto* v = k + kTokens * kDim;
  auto* out = v + kTokens * kDim;
  const BlockHandle block = must(pool.allocate(1))[0];
  std::vector<int64_t> slots;
  for (int i = 0; i < kTokens; ++i) slots.push_back(int64_t{block.id} * kTokens + i);
  std::vector<float> read(kTokens * kDim);
  int wrong = 0;
  for (int round = 0; round < 1000; ++round) {
    const auto pattern = static_cast<float>(round % 200 + 1);
    // The write comes late: whoever does not wait sees what the round before has left.
    spin(stream, round < 20 ? 50'000 : 300);
    fill_floats(stream, k, 2 * kTokens * kDim, pattern);
    must(pool.append(0, rows(k), rows(v), slots));
    fill_floats(stream, k, 2 * kTokens * kDim, NAN);
    must(pool.read(0, rows(read.data()), TensorView(), slots));
    for (const float value : read) wrong += value != pattern;
    // The other way: the executor writes, our stream reads what it wrote.
    const int32_t q_len = 1, seq_len = kTokens, id = block.id;
    std::vector<float> q(kDim, 0.0f);
    AttendBatch batch;
    batch.q = dense_tensor(q.data(), Dtype::kFp32, 1, 1, kDim);
    batch.out = dense_tensor(out, Dtype::kFp32, 1, 1, kDim);
    batch.q_lens = {&q_len, 1};
    batch.seq_lens = {&seq_len, 1};
    batch.block_table = {&id, 1};
    batch.block_table_stride = 1;
    fill_floats(stream, out, kDim, NAN);
    must(pool.attend(0, batch));
    float mean[kDim];
    REQUIRE(cudaMemcpyAsync(mean, out, sizeof mean, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    for (const float value : mean) wrong += !(std::fabs(value - pattern) < 1e-3f * pattern);
  }
  CHECK(wrong == 0);
  must(client.drop_import(import));
  CHECK(client.drop_import(import).code() == ErrorCode::kNotFound);
}

TEST_CASE("memfds are used where they lie, and outlive the engine's own mapping") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(bf16_pool()));
  node.await_ready();
  const int fd = ::memfd_create("engine", MFD_ALLOW_SEALING | MFD_CLOEXEC);
  REQUIRE(fd >= 0);
  REQUIRE(::ftruncate(fd, 1 << 20) == 0);
  void* base = ::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  MemoryImport memory;
  memory.base = base;
  memory.size_bytes = 1 << 20;
  memory.fd = fd;
  CHECK(client.import_memory(memory).status().code() == ErrorCode::kInvalidArgument);  // no seal
  REQUIRE(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  memory.size_bytes = 2 << 20;
  CHECK(client.import_memory(memory).status().code() == ErrorCode::kInvalidArgument);  // too long
  memory.size_bytes = 1 << 20;
  (void)must(client.import_memory(memory));
  ::close(fd);
  auto* k = static_cast<float*>(base);
  for (int i = 0; i < 2 * kTokens * kDim; ++i) k[i] = static_cast<float>(i % 64);
  const BlockHandle block = must(pool.allocate(1))[0];
  std::vector<int64_t> slots;
  for (int i = 0; i < kTokens; ++i) slots.push_back(int64_t{block.id} * kTokens + i);
  must(pool.append(0, rows(k), rows(k + kTokens * kDim), slots));
  std::vector<float> read(kTokens * kDim);
  must(pool.read(0, rows(read.data()), TensorView(), slots));
  CHECK(std::equal(read.begin(), read.end(), k));
  ::munmap(base, 1 << 20);
}

TEST_CASE("IPC handles are for sessions that are trusted; what has none says so") {
  if (!has_gpu()) return;
  void* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, 1 << 21) == cudaSuccess);
  MemoryImport import;
  import.kind = ImportKind::kCudaIpc;
  import.base = memory;
  import.size_bytes = 1 << 21;
  cudaIpcMemHandle_t handle;
  REQUIRE(cudaIpcGetMemHandle(&handle, memory) == cudaSuccess);
  std::memcpy(import.handle.data(), &handle, sizeof handle);
  {
    Node node(gpu_options());
    Client client = node.connect();
    Pool pool = must(client.open_pool(bf16_pool()));
    const Status refused = client.import_memory(import).status();
    CHECK(refused.code() == ErrorCode::kPermissionDenied);
    CHECK(refused.message().find("trust_ipc_handles") != std::string::npos);
  }
  TemporaryFolder folder;
  std::ofstream(folder.file("larderd.toml")) << "trust_ipc_handles = true\n";
  Node node(gpu_options({"--config", folder.file("larderd.toml")}));
  Client client = node.connect();
  Pool pool = must(client.open_pool(bf16_pool()));
  node.await_ready();
  const uint64_t id = must(client.import_memory(import));
  auto* k = static_cast<float*>(memory);
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  fill_floats(stream, k, 2 * kTokens * kDim, 3.0f);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  const BlockHandle block = must(pool.allocate(1))[0];
  std::vector<int64_t> slots;
  for (int i = 0; i < kTokens; ++i) slots.push_back(int64_t{block.id} * kTokens + i);
  must(pool.append(0, rows(k), rows(k + kTokens * kDim), slots));
  std::vector<float> read(kTokens * kDim);
  must(pool.read(0, rows(read.data()), TensorView(), slots));
  CHECK(std::count(read.begin(), read.end(), 3.0f) == std::ssize(read));
  must(client.drop_import(id));
  import.handle = {};  // no handle of anybody's
  CHECK_FALSE(client.import_memory(import).ok());
  must(pool.read(0, rows(read.data()), TensorView(), slots));  // the executor lives
  cudaFree(memory);
}

TEST_CASE("a stream is free again when the executor dies under a call, and the call is done once") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  REQUIRE(cudaFree(nullptr) == cudaSuccess);
  Client client = node.connect();
  Pool pool = must(client.open_pool(bf16_pool()));
  node.await_ready();
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  must(client.order_after(stream));
  const BlockHandle block = must(pool.allocate(1))[0];
  std::vector<int64_t> slots;
  for (int i = 0; i < kTokens; ++i) slots.push_back(int64_t{block.id} * kTokens + i);
  std::vector<float> values(kTokens * kDim, 2.0f), read(kTokens * kDim);
  for (int round = 0; round < 3; ++round) {
    spin(stream, 200'000);
    std::thread killer([&] {
      pass_time(50);
      ::kill(node.executor_pid(), SIGKILL);
    });
    must(pool.append(0, rows(values.data()), rows(values.data()), slots));
    killer.join();
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    must(pool.read(0, rows(read.data()), TensorView(), slots));
    CHECK(read == values);
    node.await_ready();
  }
}

}  // namespace
}  // namespace larder::test
