// Clients at the edge of what they have: short of descriptors, very long on one connection, with
// one pool opened twice.
#include <algorithm>
#include <cstdlib>
#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/node.h"

namespace larder::test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

std::vector<int> open_fds(pid_t pid) {
  std::vector<int> fds;
  DIR* folder = ::opendir(("/proc/" + std::to_string(pid) + "/fd").c_str());
  REQUIRE(folder != nullptr);
  while (const dirent* entry = ::readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    const bool own = pid == ::getpid() && fd == ::dirfd(folder);
    if (entry->d_name[0] != '.' && !own) fds.push_back(fd);
  }
  ::closedir(folder);
  return fds;
}

// Leaves this process `count` free descriptors while it lives.
class FdLimit {
 public:
  explicit FdLimit(int count) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const std::vector<int> fds = open_fds(::getpid());
    rlimit now{0, before_.rlim_max};
    for (int left = count; left > 0; ++now.rlim_cur)
      if (std::count(fds.begin(), fds.end(), static_cast<int>(now.rlim_cur)) == 0) --left;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &now) == 0);
  }
  ~FdLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FdLimit(const FdLimit&) = delete;
  FdLimit& operator=(const FdLimit&) = delete;

 private:
  rlimit before_{};
};

size_t count_mapped_segments() {
  const std::string maps = read_file("/proc/self/maps");
  size_t count = 0;
  for (size_t at = 0; (at = maps.find("/memfd:", at)) != std::string::npos; ++at) ++count;
  return count;
}

// 2.5 GiB in ten segments of 256 MiB, of which the tests touch a page of each at most.
PoolOptions ten_segments(Execution execution) {
  PoolOptions options;
  options.name = "wide";
  options.model = "test";
  options.geometry.block_tokens = 16;
  options.opaque_block_bytes = kMiB;
  options.num_blocks = 2560;
  options.execution = execution;
  return options;
}

void check_lost_fds(const Status& status) {
  CAPTURE(status.to_string());
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().find("3 arrived") != std::string::npos);
  CHECK(status.message().find("free descriptors") != std::string::npos);
}

TEST_CASE("a client short of descriptors gets a typed error, keeps none, and maps later") {
  Node node({"--memory-bytes", std::to_string(4096 * kMiB)});
  Client client = node.connect();
  auto pool = client.open_pool(ten_segments(Execution::kOnRequest));
  REQUIRE_MESSAGE(pool.ok(), pool.status().to_string());
  const std::vector<int> ours = open_fds(::getpid());
  const std::vector<int> of_daemon = open_fds(node.larderd().pid());
  const size_t mapped = count_mapped_segments();
  const auto nothing_leaked = [&] {
    CHECK(open_fds(::getpid()) == ours);
    CHECK(eventually([&] { return open_fds(node.larderd().pid()) == of_daemon; }));
  };
  {
    const FdLimit limit(3);
    for (int round = 0; round < 5; ++round) {
      const auto data = pool->data();
      REQUIRE(!data.ok());
      check_lost_fds(data.status());
      CHECK(count_mapped_segments() == mapped);
      CHECK(pool->stats().ok());  // the same connection
      nothing_leaked();
    }
  }
  const auto data = pool->data();
  REQUIRE_MESSAGE(data.ok(), data.status().to_string());
  CHECK(count_mapped_segments() == mapped + 10);
  nothing_leaked();
  // Every segment is where its blocks are: the executor reads there what is written here.
  auto blocks = pool->allocate(2560);
  REQUIRE(blocks.ok());
  std::vector<std::byte> page(static_cast<size_t>(kMiB));
  for (int32_t segment = 0; segment < 10; ++segment) {
    const int32_t block = segment * 256 + 255;
    const auto mark = static_cast<std::byte>(segment + 1);
    (*data)[block * pool->block_stride_bytes()] = mark;
    REQUIRE(pool->read_pages(0, std::span(&block, 1), page).ok());
    CHECK(page[0] == mark);
  }
}

TEST_CASE("a pool that could not be mapped on opening is not left open") {
  Node node({"--memory-bytes", std::to_string(4096 * kMiB)});
  Client client = node.connect();
  const std::vector<int> ours = open_fds(::getpid());
  {
    const FdLimit limit(3);
    auto pool = client.open_pool(ten_segments(Execution::kInProcess));
    REQUIRE(!pool.ok());
    check_lost_fds(pool.status());
    CHECK(open_fds(::getpid()) == ours);
  }
  const auto sessions = node.ctl({"sessions"});
  CHECK(std::all_of(sessions.begin(), sessions.end(),
                    [](const auto& session) { return session["num_pools"] == 0; }));
  {
    auto pool = client.open_pool(ten_segments(Execution::kInProcess));
    REQUIRE_MESSAGE(pool.ok(), pool.status().to_string());
  }
  node.ctl({"destroy-pool", "wide"});
  CHECK(node.ctl({"status"})["physical_bytes"] == 0);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Some times slower, and AddressSanitizer keeps 256 MiB of freed memory.
constexpr int kManyCalls = 5'000;
constexpr int64_t kGrowthKib = 512 * 1024;
#else
constexpr int kManyCalls = 100'000;
constexpr int64_t kGrowthKib = 2 * 1024;
#endif

int64_t resident_kib(pid_t pid) {
  const std::string text = read_file("/proc/" + std::to_string(pid) + "/status");
  const size_t at = text.find("VmRSS:");
  REQUIRE(at != std::string::npos);
  return std::atoll(text.c_str() + at + 6);
}

TEST_CASE("a connection has no limit of calls, and larderd does not grow with them") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  int refused = 0;
  const auto ask = [&](int times) {
    for (int i = 0; i < times; ++i) refused += pool->stats().ok() ? 0 : 1;
  };
  ask(1'000);
  const int64_t before = resident_kib(node.larderd().pid());
  ask(kManyCalls - 1'000);
  const int64_t after = resident_kib(node.larderd().pid());
  CAPTURE(before);
  CHECK(after <= before + kGrowthKib);
  CHECK(refused == 0);
}

TEST_CASE("a pool opened twice by a client is closed with the last of the two") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  const auto blocks = pool->allocate(2);
  REQUIRE(blocks.ok());
  REQUIRE(client.open_pool(small_pool("p", Execution::kInProcess)).ok());
  CHECK(pool->stats().value()[0].open == 2);
  CHECK(pool->release(*blocks).to_string() == "OK");
}

TEST_CASE("what is assigned over is closed, released and said goodbye to") {
  Node node({"--log-level", "info"});
  Client client = node.connect();
  Pool pool = client.open_pool(small_pool("p", Execution::kInProcess)).value();
  REQUIRE(pool.allocate(2).ok());
  pool = client.open_pool(small_pool("q", Execution::kInProcess)).value();
  node.ctl({"destroy-pool", "p"});  // BUSY while a session has it open
  const auto blocks = pool.allocate(3);
  REQUIRE(blocks.ok());
  pool = client.open_pool(small_pool("q", Execution::kInProcess)).value();
  CHECK(pool.release(*blocks).to_string() == "OK");
  Sequence sequence = pool.begin_sequence();
  REQUIRE(sequence.extend(32).ok());
  sequence = pool.begin_sequence();
  CHECK(pool.stats().value()[0].free == 8);
  Client other = node.connect({.name = "assigned over"});
  other = node.connect();
  CHECK(eventually([&] {
    return node.log().find("client=\"assigned over\" goodbye=true") != std::string::npos;
  }));
}

}  // namespace
}  // namespace larder::test
