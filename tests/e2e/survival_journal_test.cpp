// A journal that does not prove itself is refused with the damage named, and nothing is lost by it.
#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/mman.h>

#include "allocator/journal.h"
#include "daemon/keeper_client.h"
#include "larder/own_fd.h"
#include "tests/e2e/survival.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

// The journal as the keeper has it, to be damaged.
class JournalOf {
 public:
  explicit JournalOf(pid_t keeper) {
    const std::string folder = "/proc/" + std::to_string(keeper) + "/fd";
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
      if (target.find("memfd:larder-journal") == std::string::npos) continue;
      OwnFd fd(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
      REQUIRE(fd.valid());
      size_ = std::filesystem::file_size(entry.path());
      memory_ = static_cast<uint8_t*>(
          ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
      REQUIRE(memory_ != MAP_FAILED);
      ++found_;
    }
    REQUIRE(found_ == 1);
  }
  ~JournalOf() { ::munmap(memory_, size_); }
  JournalOf(const JournalOf&) = delete;
  JournalOf& operator=(const JournalOf&) = delete;

  JournalHeader& header() { return *reinterpret_cast<JournalHeader*>(memory_); }
  uint8_t& at(size_t byte) { return memory_[byte]; }
  size_t committed() { return header().committed_bytes; }

 private:
  int found_ = 0;
  size_t size_ = 0;
  uint8_t* memory_ = nullptr;
};

// Memory that a process holds, by descriptor. Connections come and go.
int64_t num_memfds(pid_t pid) {
  int64_t count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    count += target.find("memfd:larder-") != std::string::npos;
  }
  return count;
}

// Starts a larderd that is expected to refuse, and returns what it says.
std::string refusal(const Node& node) {
  const Output output = run({program("larderd"), "--socket", node.socket(), "--keeper",
                             node.keeper_socket(), "--http-port", "-1"});
  CHECK(output.exit_code == 1);
  return output.stderr_text;
}

struct Filled {
  explicit Filled(Node& node)
      : client(node.connect({.deadline = 30s})),
        pool(must(client.open_pool(small_pool("p", Execution::kInProcess)))),
        blocks(must(pool.allocate(5))) {
    fill_blocks(pool, blocks, 9);
    sums = checksums(pool, blocks);
  }
  void kill_larderd(Node& node) const {
    node.larderd().signal(SIGKILL);
    REQUIRE(node.larderd().wait_exit(20s).has_value());
  }
  Client client;
  Pool pool;
  std::vector<BlockHandle> blocks;
  std::vector<uint64_t> sums;
};

TEST_CASE(
    "a flipped byte of the journal is named, the keeper keeps all, and flipped back it serves") {
  Node node;
  Filled filled(node);
  const auto pools = pools_of(node);
  filled.kill_larderd(node);
  JournalOf journal(node.keeper().pid());
  const int64_t memfds = num_memfds(node.keeper().pid());
  CHECK(memfds == 4);  // the journal, the segment, the counters, the client's arena
  // Of the header, of the snapshot, and of the last record.
  for (const size_t byte : {size_t{16}, Journal::kHeaderBytes + Journal::kRecordHeaderBytes + 3,
                            journal.committed() - 12}) {
    journal.at(byte) ^= 0x40;
    const std::string text = refusal(node);
    INFO("byte ", byte, ": ", text);
    CHECK(text.find("the journal") != std::string::npos);
    CHECK(text.find("CRC32C") != std::string::npos);
    CHECK(text.find("restart larder-keeper") != std::string::npos);
    CHECK(num_memfds(node.keeper().pid()) == memfds);
    CHECK(::access((node.socket() + ".lock").c_str(), F_OK) == 0);
    journal.at(byte) ^= 0x40;
  }
  journal.header().version += 1;
  CHECK(refusal(node).find("UNSUPPORTED") != std::string::npos);
  journal.header().version -= 1;
  node.start_larderd();
  node.await_ready();
  CHECK(eventually([&] { return filled.client.resumes() == 1; }));
  CHECK(pools_of(node) == pools);
  CHECK(checksums(filled.pool, filled.blocks) == filled.sums);
  CHECK(filled.pool.release(filled.blocks).ok());
}

TEST_CASE("a torn tail is dropped, and what was told to somebody is all there") {
  Node node;
  Filled filled(node);
  const auto pools = pools_of(node);
  for (uint64_t round = 1; round <= 3; ++round) {
    filled.kill_larderd(node);
    {
      JournalOf journal(node.keeper().pid());
      // A header that promises 1000 bytes, of which some are there.
      JournalRecordHeader torn;
      torn.crc = 0x12345678;
      torn.length_bytes = 1000;
      const size_t end = (journal.committed() + 7) / 8 * 8;
      std::memcpy(&journal.at(end), &torn, sizeof torn);
      for (size_t i = 0; i < 300; ++i) journal.at(end + sizeof torn + i) = static_cast<uint8_t>(i);
    }
    node.start_larderd();
    node.await_ready();
    CHECK(eventually([&] { return filled.client.resumes() == round; }));
    CHECK(pools_of(node) == pools);
    CHECK(checksums(filled.pool, filled.blocks) == filled.sums);
  }
}

TEST_CASE("a keeper that lacks a segment of the journal's is refused, naming it") {
  Node node;
  Filled filled(node);
  filled.kill_larderd(node);
  // Dropped by somebody who then ends: the keeper has one owner at a time.
  Child dropping([&](const Talk&) {
    auto keeper = must(daemon::KeeperClient::connect(node.keeper_socket()));
    must(keeper.drop(protocol::keeper_key(protocol::KeeperKind::kSegment, 1)));
  });
  REQUIRE(dropping.wait() == 0);
  const std::string text = refusal(node);
  INFO(text);
  CHECK(text.find("names segment 1 (pool 1, group 0, extent 0)") != std::string::npos);
  CHECK(text.find("which the keeper does not hold") != std::string::npos);
}

}  // namespace
}  // namespace larder::test
