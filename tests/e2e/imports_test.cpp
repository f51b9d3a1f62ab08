// Memory of the engine in calls on request: used where it lies, checked, and gone when it is said.
// On a GPU: tests/gpu/order_test.cpp.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "larder/own_fd.h"
#include "tests/support/node.h"

namespace larder::test {
namespace {

constexpr int kDim = 64, kTokens = 16;
constexpr int64_t kBytes = int64_t{1} << 20;

template <typename Value>
Value must(Result<Value> result) {
  if (!result) FAIL(result.status().to_string());
  return std::move(*result);
}

// A memfd of 1 MiB, mapped here.
struct EngineMemory {
  explicit EngineMemory(bool sealed)
      : fd(::memfd_create("engine", MFD_ALLOW_SEALING | MFD_CLOEXEC)) {
    REQUIRE(::ftruncate(fd.get(), kBytes) == 0);
    if (sealed) REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    base = static_cast<float*>(
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
    REQUIRE(base != MAP_FAILED);
  }
  ~EngineMemory() { ::munmap(base, kBytes); }
  MemoryImport import() const {
    MemoryImport memory;
    memory.base = base;
    memory.size_bytes = kBytes;
    memory.fd = fd.get();
    return memory;
  }
  OwnFd fd;
  float* base;
};

TensorView rows(float* data) { return dense_tensor(data, Dtype::kFp32, kTokens, 1, kDim); }

std::vector<int64_t> slots_of(const BlockHandle& block) {
  std::vector<int64_t> slots;
  for (int i = 0; i < kTokens; ++i) slots.push_back(int64_t{block.id} * kTokens + i);
  return slots;
}

TEST_CASE("K and V in the engine's own memory reach the pool, and attention comes back there") {
  Node node({"--device", "host"});
  Client client = node.connect();
  Pool pool = must(client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16)));
  EngineMemory memory(true);
  (void)must(client.import_memory(memory.import()));
  float* const k = memory.base;
  float* const v = k + kTokens * kDim;
  float* const out = v + kTokens * kDim;
  for (int i = 0; i < kTokens * kDim; ++i) {
    k[i] = static_cast<float>(i % 32);
    v[i] = 3.0f;
    out[i] = -1.0f;
  }
  const BlockHandle block = must(pool.allocate(1))[0];
  const std::vector<int64_t> slots = slots_of(block);
  REQUIRE(pool.append(0, rows(k), rows(v), slots).ok());
  std::vector<float> read(kTokens * kDim);
  REQUIRE(pool.read(0, rows(read.data()), TensorView(), slots).ok());
  CHECK(std::equal(read.begin(), read.end(), k));
  std::vector<float> q(kDim, 1.0f);
  const int32_t q_len = 1, seq_len = kTokens, id = block.id;
  AttendBatch batch;
  batch.q = dense_tensor(q.data(), Dtype::kFp32, 1, 1, kDim);
  batch.out = dense_tensor(out, Dtype::kFp32, 1, 1, kDim);
  batch.q_lens = {&q_len, 1};
  batch.seq_lens = {&seq_len, 1};
  batch.block_table = {&id, 1};
  batch.block_table_stride = 1;
  REQUIRE(pool.attend(0, batch).ok());
  CHECK(std::count(out, out + kDim, 3.0f) == kDim);
  CHECK(out[kDim] == -1.0f);
}

TEST_CASE("memory that cannot be trusted or is not what was said is refused, and nothing stays") {
  Node node({"--device", "host"});
  Client client = node.connect();
  Pool pool = must(client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16)));
  const EngineMemory open(false), sealed(true);
  CHECK(client.import_memory(open.import()).status().code() == ErrorCode::kInvalidArgument);
  MemoryImport memory = sealed.import();
  memory.size_bytes = kBytes + 1;
  const Status too_long = client.import_memory(memory).status();
  CHECK(too_long.code() == ErrorCode::kInvalidArgument);
  CHECK(too_long.message().find("1048577") != std::string::npos);
  memory = sealed.import();
  memory.kind = ImportKind::kVmm;
  CHECK(client.import_memory(memory).status().code() == ErrorCode::kUnsupported);
  memory.kind = ImportKind::kCudaIpc;
  CHECK(client.import_memory(memory).status().code() == ErrorCode::kPermissionDenied);
  memory = sealed.import();
  memory.base = nullptr;
  CHECK(client.import_memory(memory).status().code() == ErrorCode::kInvalidArgument);
  const uint64_t id = must(client.import_memory(sealed.import()));
  CHECK(client.drop_import(id).ok());
  CHECK(client.drop_import(id).code() == ErrorCode::kNotFound);
  CHECK(client.order_after(nullptr).code() == ErrorCode::kUnsupported);
}

TEST_CASE("a session has at most 64 imports, and those that are dropped make room") {
  Node node({"--device", "host"});
  Client client = node.connect();
  Pool pool = must(client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16)));
  const EngineMemory memory(true);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 64; ++i) ids.push_back(must(client.import_memory(memory.import())));
  CHECK(client.import_memory(memory.import()).status().code() == ErrorCode::kResourceExhausted);
  CHECK(client.drop_import(ids[5]).ok());
  CHECK(client.import_memory(memory.import()).ok());
}

TEST_CASE("an import outlives the executor, and is told to be gone after a restart of larderd") {
  Node node({"--device", "host"});
  Client client = node.connect();
  Pool pool = must(client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16)));
  EngineMemory memory(true);
  (void)must(client.import_memory(memory.import()));
  const BlockHandle block = must(pool.allocate(1))[0];
  const std::vector<int64_t> slots = slots_of(block);
  for (int round = 0; round < 3; ++round) {
    ::kill(node.executor_pid(), SIGKILL);
    memory.base[0] = static_cast<float>(round);
    REQUIRE(pool.append(0, rows(memory.base), rows(memory.base), slots).ok());
    std::vector<float> read(kTokens * kDim);
    REQUIRE(pool.read(0, rows(read.data()), TensorView(), slots).ok());
    CHECK(read[0] == static_cast<float>(round));
    node.await_ready();
  }
  node.replace_larderd(SIGKILL);
  const Status gone = pool.append(0, rows(memory.base), rows(memory.base), slots);
  CHECK(gone.code() == ErrorCode::kNotFound);
  std::vector<float> elsewhere(kTokens * kDim, 1.0f);
  CHECK(pool.append(0, rows(elsewhere.data()), rows(elsewhere.data()), slots).ok());
}

}  // namespace
}  // namespace larder::test
