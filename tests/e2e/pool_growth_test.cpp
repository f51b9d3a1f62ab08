// Pools that grow and shrink, with processes that have their memory mapped: when bytes come back.
#include "tests/e2e/survival.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kExtentBytes = int64_t{4} << 20;
constexpr int64_t kBlocksPerExtent = 512;  // of 8 KiB: 2 layers, 16 tokens, dim 64, bf16, K and V

PoolOptions growing_pool(Execution execution = Execution::kInProcess) {
  PoolOptions options = small_pool("p", execution, KvFormat::kBf16, kBlocksPerExtent);
  options.max_blocks = 4 * kBlocksPerExtent;
  options.segment_bytes = kExtentBytes;
  return options;
}

int64_t physical_bytes(const Node& node) { return node.ctl({"status"})["physical_bytes"]; }

// Mappings of pool memory in a process, in bytes.
int64_t mapped_bytes(pid_t pid) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  int64_t sum = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:larder-pool") == std::string::npos) continue;
    uint64_t begin = 0;
    uint64_t end = 0;
    REQUIRE(std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) == 2);
    sum += static_cast<int64_t>(end - begin);
  }
  return sum;
}

// Bytes of pool memory that exist at all: shared memory that some process still has.
int64_t pages_held_by_keeper(const Node& node) {
  return node.ctl({"status"})["keeper_segments"].get<int64_t>() * kExtentBytes;
}

// Attaches, has blocks in both extents for a while, and lives on with everything mapped; says, when
// asked, how much that is. What the test had mapped when it forked is not counted.
void map_all(const Node& node, const Talk& talk) {
  const int64_t inherited = mapped_bytes(::getpid());
  Client client = must(Client::connect({.socket_path = node.socket(), .name = "mapper"}));
  Pool pool = must(client.open_pool(growing_pool()));
  const auto blocks = must(pool.allocate(2 * kBlocksPerExtent));
  fill_blocks(pool, blocks, 5);
  must(pool.release(blocks));
  talk.say("ready");
  while (talk.hear() != "end") talk.say(std::to_string(mapped_bytes(::getpid()) - inherited));
}

TEST_CASE(
    "a pool grows when blocks are asked for, and another process sees what is in the growth") {
  Node node;
  Client client = node.connect();
  Pool pool = must(client.open_pool(growing_pool()));
  CHECK(physical_bytes(node) == kExtentBytes);
  CHECK(mapped_bytes(::getpid()) == kExtentBytes);
  const auto blocks = must(pool.allocate(kBlocksPerExtent + 1));
  CHECK(physical_bytes(node) == 2 * kExtentBytes);
  CHECK(mapped_bytes(::getpid()) == 2 * kExtentBytes);
  fill_blocks(pool, blocks, 3);
  const auto text = text_tokens(16 * (kBlocksPerExtent + 1));
  must(pool.publish(text, blocks));
  const uint64_t sum = checksums(pool, {blocks.back()})[0];
  Child other([&](const Talk& talk) {
    Client reader = must(Client::connect({.socket_path = node.socket()}));
    Pool same = must(reader.open_pool(growing_pool()));
    const Prefix prefix = must(same.lookup(text, true));
    talk.say(std::to_string(checksums(same, {prefix.blocks.back()})[0]));
  });
  CHECK(other.hear() == std::to_string(sum));
  CHECK(other.wait() == 0);
  CHECK(must(pool.allocate(3 * kBlocksPerExtent - 1)).size() == 3 * kBlocksPerExtent - 1);
  CHECK(physical_bytes(node) == 4 * kExtentBytes);
  const auto refused = pool.allocate(1);
  REQUIRE(!refused.ok());
  CHECK(refused.status().code() == ErrorCode::kResourceExhausted);
}

TEST_CASE("a pool that shrinks is unmapped by its clients, and its memory comes back") {
  Node node;
  Client client = node.connect();
  Pool pool = must(client.open_pool(growing_pool()));
  Child mapper([&](const Talk& talk) { map_all(node, talk); });
  REQUIRE(mapper.hear() == "ready");
  REQUIRE(physical_bytes(node) == 2 * kExtentBytes);
  const auto mine = must(pool.allocate(kBlocksPerExtent + 1));  // so that this process maps both
  must(pool.release(mine));
  const ResizeResult shrunk = must(pool.resize(kBlocksPerExtent));
  CHECK(shrunk.blocks_before == 2 * kBlocksPerExtent);
  CHECK(shrunk.blocks_after == kBlocksPerExtent);
  CHECK(eventually([&] { return physical_bytes(node) == kExtentBytes; }));
  CHECK(pages_held_by_keeper(node) == kExtentBytes);
  CHECK(group_of(node, "p")["leaving_bytes"] == 0);
  CHECK(mapped_bytes(::getpid()) == kExtentBytes);
  mapper.say("mapped");
  CHECK(mapper.hear() == std::to_string(kExtentBytes));
  // And it grows again.
  const auto again = must(pool.allocate(kBlocksPerExtent + 1));
  fill_blocks(pool, again, 4);
  CHECK(physical_bytes(node) == 2 * kExtentBytes);
  mapper.say("end");
  CHECK(mapper.wait() == 0);
}

TEST_CASE("a client that does not unmap in time is ended, and charged for until it dies") {
  const ConfigFile config("unmap_deadline_ms = 300\n");
  Node node(config.options());
  Client client = node.connect({.name = "resizer"});
  Pool pool = must(client.open_pool(growing_pool()));
  Child mapper([&](const Talk& talk) { map_all(node, talk); });
  REQUIRE(mapper.hear() == "ready");
  mapper.stop();
  must(pool.resize(kBlocksPerExtent));
  CHECK(physical_bytes(node) == 2 * kExtentBytes);
  CHECK(group_of(node, "p")["leaving_bytes"] == kExtentBytes);
  CHECK(eventually([&] { return count_closing(node) == 1; }));
  CHECK(node.log().find("event=unmap_overdue") != std::string::npos);
  CHECK(physical_bytes(node) == 2 * kExtentBytes);
  CHECK(node.http("/metrics")
            .find("larder_tenant_bytes{tenant=\"default\",kind=\"leaving\"} 4194304") !=
        std::string::npos);
  // Also over a restart of larderd.
  node.replace_larderd(SIGKILL);
  CHECK(eventually([&] { return client.resumes() == 1; }));
  CHECK(physical_bytes(node) == 2 * kExtentBytes);
  mapper.kill();
  CHECK(eventually([&] { return physical_bytes(node) == kExtentBytes; }));
  CHECK(group_of(node, "p")["leaving_bytes"] == 0);
  CHECK(pages_held_by_keeper(node) == kExtentBytes);
}

TEST_CASE("memory that is asked back while larderd restarts comes back when the client does") {
  Node node;
  Client client = node.connect();
  Pool pool = must(client.open_pool(growing_pool()));
  Child mapper([&](const Talk& talk) { map_all(node, talk); });
  REQUIRE(mapper.hear() == "ready");
  mapper.stop();
  must(pool.resize(kBlocksPerExtent));
  CHECK(physical_bytes(node) == 2 * kExtentBytes);
  node.replace_larderd(SIGKILL);
  CHECK(eventually([&] { return client.resumes() == 1; }));
  CHECK(physical_bytes(node) == 2 * kExtentBytes);
  mapper.signal(SIGCONT);
  CHECK(eventually([&] { return physical_bytes(node) == kExtentBytes; }));
  CHECK(count_closing(node) == 0);
  mapper.say("mapped");
  CHECK(mapper.hear() == std::to_string(kExtentBytes));
  mapper.say("end");
  CHECK(mapper.wait() == 0);
}

TEST_CASE("a growing pool grows, shrinks and keeps its bytes over restarts of larderd") {
  Node node;
  Client client = node.connect();
  Pool pool = must(client.open_pool(growing_pool(Execution::kInProcess)));
  auto kept = must(pool.allocate(10));
  fill_blocks(pool, kept, 1);
  const auto sums = checksums(pool, kept);
  for (int round = 0; round < 4; ++round) {
    const auto more = must(pool.allocate(2 * kBlocksPerExtent));
    fill_blocks(pool, more, static_cast<uint32_t>(round));
    const auto more_sums = checksums(pool, more);
    REQUIRE(physical_bytes(node) == 3 * kExtentBytes);
    node.replace_larderd(SIGKILL);
    CHECK(checksums(pool, more) == more_sums);
    must(pool.release(more));
    must(pool.resize(kBlocksPerExtent));
    node.replace_larderd(SIGKILL);
    CHECK(eventually([&] { return physical_bytes(node) == kExtentBytes; }));
    CHECK(checksums(pool, kept) == sums);
  }
}

}  // namespace
}  // namespace larder::test
