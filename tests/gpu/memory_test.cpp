// Whose memory it is: books that agree with the driver's, a daemon without a context, and segments
// that outlive it.
#include <chrono>
#include <numeric>
#include <signal.h>

#include "tests/gpu/gpu_node.h"

namespace larder::test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

std::vector<int32_t> ids_of(const std::vector<BlockHandle>& blocks) {
  std::vector<int32_t> ids;
  for (const BlockHandle& block : blocks) ids.push_back(block.id);
  return ids;
}

void destroy(const Node& node, const std::string& name) { (void)node.ctl({"destroy-pool", name}); }

TEST_CASE("a pool costs the device what the books say, and destroyed it is all back") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  REQUIRE(cudaFree(nullptr) == cudaSuccess);  // our own context is there before the first look
  const int64_t before = free_device_bytes();
  Client client = node.connect();
  {
    Pool first = must(client.open_pool(byte_pool("first", 1, Execution::kOnRequest)));
    node.await_ready();  // the executor's context
    const int64_t with_executor = free_device_bytes();
    MESSAGE("executor: ", (before - with_executor) / kMiB, " MiB");
    {
      Pool pool = must(client.open_pool(byte_pool("second", 2048, Execution::kOnRequest)));
      CHECK(must(pool.stats())[0].physical_bytes == 4096 * kMiB);
      // The driver's own tables for the memory are the rest: about 4 MiB for each GiB.
      const int64_t cost = with_executor - free_device_bytes();
      CHECK(cost >= 4096 * kMiB);
      CHECK(cost <= (4096 + 32) * kMiB);
      MESSAGE("4096 MiB cost ", cost / kMiB, " MiB");
      CHECK(node.ctl({"status"})["physical_bytes"].get<int64_t>() == 4098 * kMiB);
    }
    destroy(node, "second");
    CHECK(eventually([&] { return free_device_bytes() == with_executor; }));
  }
  destroy(node, "first");
  // The executor of a GPU without pools ends, and its context with it.
  CHECK(eventually([&] { return before - free_device_bytes() < 4 * kMiB; }));
  CHECK(node.ctl({"status"})["executors"].size() == 1);
}

TEST_CASE("larderd and the keeper have no context, the executor has one") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(byte_pool("bytes", 4, Execution::kOnRequest)));
  node.await_ready();
  CHECK(must(pool.checksum(ids_of(must(pool.allocate(1))))).size() == 1);
  const std::vector<pid_t> processes = compute_processes();
  REQUIRE_MESSAGE(!processes.empty(), "nvidia-smi lists no processes");
  CHECK(contains(processes, node.executor_pid()));
  CHECK_FALSE(contains(processes, node.larderd().pid()));
  CHECK_FALSE(contains(processes, node.keeper().pid()));
}

TEST_CASE("new segments are zero, whoever had the memory before") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  const int num_blocks = 512;
  for (int round = 0; round < 3; ++round) {
    {
      Pool pool = must(client.open_pool(byte_pool("round", num_blocks, Execution::kOnRequest)));
      const std::vector<int32_t> ids = ids_of(must(pool.allocate(num_blocks)));
      const uint64_t zeros = must(pool.checksum({ids.data(), 1}))[0];
      std::vector<std::byte> first(static_cast<size_t>(pool.page_bytes()), std::byte{1});
      must(pool.read_pages(0, {ids.data(), 1}, first));
      CHECK(std::count(first.begin(), first.end(), std::byte{0}) == std::ssize(first));
      for (const uint64_t sum : must(pool.checksum(ids))) CHECK(sum == zeros);
      std::vector<std::byte> secret(static_cast<size_t>(pool.page_bytes()), std::byte{0x5A});
      for (const int32_t id : ids) must(pool.write_pages(0, {&id, 1}, secret));
    }
    destroy(node, "round");
  }
}

TEST_CASE("16 GiB in 64 segments survive SIGKILL of larderd, and are served again at once") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  const int num_blocks = 8192;
  Pool pool = must(client.open_pool(byte_pool("large", num_blocks, Execution::kOnRequest)));
  node.await_ready();
  const std::vector<BlockHandle> blocks = must(pool.allocate(num_blocks));
  std::vector<int32_t> some;
  for (int i = 0; i < num_blocks; i += 97) some.push_back(blocks[static_cast<size_t>(i)].id);
  std::vector<std::byte> bytes(static_cast<size_t>(pool.page_bytes()));
  for (const int32_t id : some) {
    for (size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::byte>((i * 31 + static_cast<size_t>(id)) >> 3);
    must(pool.write_pages(0, {&id, 1}, bytes));
  }
  const std::vector<uint64_t> before = must(pool.checksum(some));
  const int64_t free_bytes = free_device_bytes();
  for (int round = 0; round < 3; ++round) {
    node.larderd().signal(SIGKILL);
    REQUIRE(node.larderd().wait_exit(std::chrono::seconds(30)).has_value());
    const auto begin = std::chrono::steady_clock::now();
    node.start_larderd();
    REQUIRE(eventually([&] {
      const std::string log = node.log();
      return log.rfind("event=serving") != std::string::npos &&
             log.rfind("event=serving") > log.rfind("event=cache_recovered");
    }));
    const auto served = std::chrono::steady_clock::now() - begin;
    node.await_ready();
    const auto ready = std::chrono::steady_clock::now() - begin;
    MESSAGE("larderd serves after ",
            std::chrono::duration_cast<std::chrono::milliseconds>(served).count(),
            " ms, its executor after ",
            std::chrono::duration_cast<std::chrono::milliseconds>(ready).count(), " ms");
    CHECK(must(pool.checksum(some)) == before);
  }
  CHECK(eventually([&] { return std::abs(free_device_bytes() - free_bytes) < 16 * kMiB; }));
}

TEST_CASE("memory that is not there is refused, and everything goes on") {
  if (!has_gpu()) return;
  Node node(gpu_options({}, "1TiB"));
  Client client = node.connect();
  Pool small = must(client.open_pool(byte_pool("small", 1, Execution::kOnRequest)));
  node.await_ready();
  const int64_t before = free_device_bytes();
  const Status status =
      client.open_pool(byte_pool("too large", 200000, Execution::kOnRequest)).status();
  CHECK(status.code() == ErrorCode::kResourceExhausted);
  INFO(status.to_string());
  CHECK(status.message().find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
  CHECK(eventually([&] { return free_device_bytes() == before; }));
  Pool again = must(client.open_pool(byte_pool("fits", 100, Execution::kOnRequest)));
  CHECK(again.num_blocks() == 100);
}

TEST_CASE("two clients of one pool read one memory; 300 times of opening leave nothing behind") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client writer = node.connect(), reader = node.connect();
  Pool ours = must(writer.open_pool(byte_pool("both", 8, Execution::kInProcess)));
  const std::vector<BlockHandle> blocks = must(ours.allocate(1));
  const std::vector<int32_t> tokens(16, 7);
  std::vector<std::byte> bytes(static_cast<size_t>(ours.page_bytes()), std::byte{0x33});
  must(ours.write_pages(0, ids_of(blocks), bytes));
  const BlockHandle published = must(ours.publish(tokens, blocks))[0].block;
  const auto count_fds = [&](pid_t pid) {
    return run({"/bin/sh", "-c", "ls /proc/" + std::to_string(pid) + "/fd | wc -l"}).stdout_text;
  };
  std::string larderd_fds, our_fds;
  int64_t free_bytes = 0;
  for (int round = 0; round < 300; ++round) {
    {
      Pool theirs = must(reader.open_pool(byte_pool("both", 8, Execution::kInProcess)));
      std::vector<std::byte> read(bytes.size());
      must(theirs.read_pages(0, {&published.id, 1}, read));
      REQUIRE(read == bytes);
    }
    if (round == 2) {
      larderd_fds = count_fds(node.larderd().pid());
      our_fds = count_fds(::getpid());
      free_bytes = free_device_bytes();
    }
  }
  CHECK(count_fds(node.larderd().pid()) == larderd_fds);
  CHECK(count_fds(::getpid()) == our_fds);
  CHECK(std::abs(free_device_bytes() - free_bytes) <= 4 * kMiB);
}

}  // namespace
}  // namespace larder::test
