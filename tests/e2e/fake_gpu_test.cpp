// Pools on a GPU without one: larderd and clients on a driver that keeps "device memory" in memfds
// (tests/support/fake_cuda). Memory, books and restarts are the real thing; kernels cannot run, so
// that the executor of the GPU never comes up, which is a case of its own.
#include <cstdlib>
#include <cstring>
#include <signal.h>

#include <doctest/doctest.h>

#include "tests/support/node.h"

namespace larder::test {
namespace {

template <typename Value>
Value must(Result<Value> result) {
  if (!result) FAIL(result.status().to_string());
  return std::move(*result);
}

// CTest gives the driver to this program and to what it starts.
bool on_fake_driver() {
  if (std::getenv("FAKE_CUDA_DIR") != nullptr) return true;
  MESSAGE("skipped: run it through ctest, which puts the fake driver into its environment");
  return false;
}

std::vector<std::string> options() { return {"--device", "auto", "--memory-bytes", "8GiB"}; }

PoolOptions byte_pool(const std::string& name, int64_t num_blocks) {
  PoolOptions result;
  result.name = name;
  result.model = "bytes@1";
  result.opaque_block_bytes = int64_t{2} << 20;
  result.geometry.block_tokens = 16;
  result.num_blocks = num_blocks;
  result.execution = Execution::kOnRequest;
  return result;
}

// A node whose executor of the GPU need not come up.
Pool open(Client& client, const PoolOptions& pool) { return must(client.open_pool(pool)); }

TEST_CASE("a pool of a GPU is its driver's memory, outlives larderd, and is one for all clients") {
  if (!on_fake_driver()) return;
  Node node(options());
  Client client = node.connect(), other = node.connect();
  Pool pool = open(client, byte_pool("bytes", 8));
  CHECK(pool.device().starts_with("GPU-"));
  CHECK(must(pool.stats())[0].physical_bytes == int64_t{16} << 20);
  const BlockHandle block = must(pool.allocate(1))[0];
  std::byte* const ours = must(pool.data()) + block.id * pool.block_stride_bytes();
  std::memset(ours, 0x5A, size_t{2} << 20);
  Pool theirs = open(other, byte_pool("bytes", 8));
  const std::byte* const seen = must(theirs.data()) + block.id * pool.block_stride_bytes();
  CHECK(std::memcmp(ours, seen, size_t{2} << 20) == 0);
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(std::chrono::seconds(30)).has_value());
  node.start_larderd();
  CHECK(must(pool.allocate(1)).size() == 1);  // the session goes on
  Client third = node.connect();
  Pool again = open(third, byte_pool("bytes", 8));
  CHECK_FALSE(again.created());
  CHECK(std::memcmp(must(again.data()) + block.id * pool.block_stride_bytes(), ours,
                    size_t{2} << 20) == 0);
}

TEST_CASE("a group on a GPU grows and shrinks under a client that has it mapped") {
  if (!on_fake_driver()) return;
  Node node(options());
  Client client = node.connect();
  PoolOptions growing = byte_pool("grows", 4);
  growing.max_blocks = 16;
  growing.segment_bytes = int64_t{4} << 20;
  Pool pool = open(client, growing);
  std::byte* const base = must(pool.data());
  CHECK(must(pool.resize(16)).blocks_after == 16);
  std::byte byte{0};
  for (const BlockHandle& block : must(pool.allocate(16))) {
    base[block.id * pool.block_stride_bytes()] = std::byte{1};
    byte |= base[block.id * pool.block_stride_bytes()];
  }
  CHECK(byte == std::byte{1});
  CHECK(must(pool.data()) == base);
}

TEST_CASE(
    "memory that the GPU does not have is refused with the driver's word, and nothing stays") {
  if (!on_fake_driver()) return;
  Node node(options());
  Client client = node.connect();
  for (int round = 0; round < 3; ++round) {
    // The fake device has 1 GiB: 256 MiB segments fail at the fourth or fifth.
    const Status status = client.open_pool(byte_pool("too large", 1024)).status();
    CHECK(status.code() == ErrorCode::kResourceExhausted);
    INFO(status.to_string());
    CHECK(status.message().find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
  }
  Pool pool = open(client, byte_pool("fits", 384));
  CHECK(node.ctl({"status"})["physical_bytes"].get<int64_t>() == int64_t{768} << 20);
}

TEST_CASE("names of devices: those that exist are served, others are refused with those that do") {
  if (!on_fake_driver()) return;
  Node node(options());
  Client client = node.connect();
  PoolOptions pool = byte_pool("elsewhere", 1);
  pool.device = "GPU-00000000-0000-0000-0000-000000000001";
  const Status unknown = client.open_pool(pool).status();
  CHECK(unknown.code() == ErrorCode::kNotFound);
  CHECK(unknown.message().find("GPU-") != std::string::npos);
  pool.device = "cuda:0";
  CHECK(client.open_pool(pool).status().code() == ErrorCode::kInvalidArgument);
  pool.device = "host";
  Pool host = open(client, pool);
  CHECK(host.device() == "host");
  pool.device = "auto";
  const Status moved = client.open_pool(pool).status();
  CHECK(moved.code() == ErrorCode::kInvalidArgument);
  CHECK(moved.message().find("device is host in the pool and GPU-") != std::string::npos);
}

TEST_CASE(
    "an executor that cannot start: readyz and livez say so, blocks are served all the same") {
  if (!on_fake_driver()) return;
  Node node(options());
  Client client = node.connect();
  Pool pool = open(client, byte_pool("bytes", 8));
  CHECK(eventually([&] { return node.http("/livez").find("503") != std::string::npos; },
                   std::chrono::seconds(30)));
  CHECK(node.http("/livez").find(pool.device()) != std::string::npos);
  CHECK(node.http("/readyz").find("503") != std::string::npos);
  const std::vector<BlockHandle> blocks = must(pool.allocate(2));
  CHECK(pool.release(blocks).ok());
  CHECK(must(pool.stats())[0].free == 8);
}

}  // namespace
}  // namespace larder::test
