#include "daemon/journal_file.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <sched.h>
#include <string>
#include <sys/stat.h>

#include <doctest/doctest.h>

#include "larder/system_error.h"
#include "tests/daemon/keeper_process.h"
#include "tests/support/random.h"

namespace larder::daemon {
namespace {

using test::Child;
using test::KeeperProcess;
using test::Shared;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

ino_t inode_of(int fd) {
  struct stat info {};
  REQUIRE(::fstat(fd, &info) == 0);
  return info.st_ino;
}

// What the keeper has under the journal's key.
OwnFd kept(KeeperClient& keeper) {
  auto entries = keeper.list();
  REQUIRE_MESSAGE(entries.ok(), entries.status().to_string());
  const auto entry = std::ranges::find(*entries, JournalFile::kKey, &KeeperClient::Entry::key);
  REQUIRE(entry != entries->end());
  return std::move(entry->fd);
}

JournalFile::Found adopt_kept(KeeperClient& keeper) {
  auto found = JournalFile::adopt(kept(keeper));
  REQUIRE_MESSAGE(found.ok(), found.status().to_string());
  return std::move(*found);
}

JournalFile create(KeeperClient& keeper, uint64_t sequence, const std::string& snapshot) {
  auto file = JournalFile::create(keeper, sequence, bytes_of(snapshot));
  REQUIRE_MESSAGE(file.ok(), file.status().to_string());
  return std::move(*file);
}

TEST_CASE("what one process appended the next one adopts from the keeper, and goes on after it") {
  const KeeperProcess process;
  KeeperClient keeper = process.connect();
  {
    JournalFile file = create(keeper, 10, "ten");
    CHECK(file.append(bytes_of("eleven")));
    CHECK(file.append(bytes_of("")));
    CHECK(file.last_sequence() == 12);
    CHECK(file.num_records() == 2);
    CHECK(file.num_checkpoints() == 0);
    CHECK(file.capacity_bytes() == 32 << 20);
    CHECK(file.used_bytes() == 64 + 24 + 24 + 16);
  }
  for (int round = 0; round < 2; ++round) {
    JournalFile::Found found = adopt_kept(keeper);
    CHECK(found.contents.snapshot_sequence == 10);
    CHECK(text_of(found.contents.snapshot) == "ten");
    REQUIRE(found.contents.records.size() == static_cast<size_t>(2 + round));
    CHECK(text_of(found.contents.records[0]) == "eleven");
    CHECK(found.file.last_sequence() == static_cast<uint64_t>(12 + round));
    CHECK(found.file.append(bytes_of("more")));
  }
  // The metadata says what it is.
  const auto entries = keeper.list();
  REQUIRE(entries->size() == 1);
  CHECK(std::memcmp(entries->at(0).metadata.data(), "journal1", 8) == 0);
}

TEST_CASE("a fresh journal replaces what is under the key") {
  const KeeperProcess process;
  KeeperClient keeper = process.connect();
  const JournalFile old_file = create(keeper, 1, "old");
  const JournalFile new_file = create(keeper, 1, "new");
  CHECK(keeper.num_entries() == 1);
  CHECK(inode_of(kept(keeper).get()) == inode_of(new_file.fd()));
  CHECK(text_of(adopt_kept(keeper).contents.snapshot) == "new");
}

TEST_CASE("a checkpoint goes on in a new file that takes the old one's place") {
  const KeeperProcess process;
  KeeperClient keeper = process.connect();
  JournalFile file = create(keeper, 0, "start");
  const ino_t before = inode_of(file.fd());
  CHECK(file.append(bytes_of("one")));
  CHECK(file.append(bytes_of("two")));
  REQUIRE(file.checkpoint(keeper, bytes_of("both")).ok());
  CHECK(inode_of(file.fd()) != before);
  CHECK(file.num_checkpoints() == 1);
  CHECK(file.num_records() == 0);
  CHECK(file.last_sequence() == 2);
  CHECK(file.append(bytes_of("three")));
  CHECK(keeper.num_entries() == 1);
  const JournalFile::Found found = adopt_kept(keeper);
  CHECK(inode_of(found.file.fd()) == inode_of(file.fd()));
  CHECK(found.contents.snapshot_sequence == 2);
  CHECK(text_of(found.contents.snapshot) == "both");
  REQUIRE(found.contents.records.size() == 1);
  CHECK(text_of(found.contents.records[0]) == "three");
  CHECK(found.contents.last_sequence == 3);
}

TEST_CASE("a full file takes nothing until a checkpoint has made room") {
  const KeeperProcess process;
  KeeperClient keeper = process.connect();
  JournalFile file = create(keeper, 0, "");
  const std::string record(1 << 20, 'r');
  size_t count = 0;
  while (file.append(bytes_of(record))) ++count;
  CHECK(count == 31);  // 32 MiB less the headers
  CHECK(file.append(bytes_of("small")));
  REQUIRE(file.checkpoint(keeper, bytes_of("all")).ok());
  CHECK(file.append(bytes_of(record)));
  CHECK(adopt_kept(keeper).contents.last_sequence == 33);
}

TEST_CASE("the capacity follows the snapshot, in units of 2 MiB") {
  constexpr int64_t kMib = 1 << 20;
  CHECK(JournalFile::capacity_for(0) == 32 * kMib);
  CHECK(JournalFile::capacity_for(8 * kMib) == 32 * kMib);
  CHECK(JournalFile::capacity_for(8 * kMib + 1) == 34 * kMib);
  CHECK(JournalFile::capacity_for(100 * kMib) == 216 * kMib);
}

TEST_CASE("without a keeper a checkpoint goes on in the new file, for the keeper that comes back") {
  KeeperProcess process;
  KeeperClient keeper = process.connect();
  JournalFile file = create(keeper, 0, "start");
  CHECK(file.append(bytes_of("one")));
  process.process().signal(SIGKILL);
  REQUIRE(process.process().wait_exit(std::chrono::seconds(20)).has_value());
  CHECK(file.append(bytes_of("two")));
  const Status status = file.checkpoint(keeper, bytes_of("two of them"));
  CHECK(status.code() == ErrorCode::kUnavailable);
  CHECK(file.num_checkpoints() == 1);
  CHECK(file.num_records() == 0);
  CHECK(file.append(bytes_of("three")));
  CHECK(file.deposit(keeper).code() == ErrorCode::kUnavailable);
  CHECK(JournalFile::create(keeper, 0, {}).status().code() == ErrorCode::kUnavailable);

  process.start();
  KeeperClient back = process.connect();
  REQUIRE(file.deposit(back).ok());
  const JournalFile::Found found = adopt_kept(back);
  CHECK(text_of(found.contents.snapshot) == "two of them");
  CHECK(found.contents.last_sequence == 3);
}

TEST_CASE("a checkpoint that the keeper refuses changes nothing") {
  const KeeperProcess process;
  KeeperClient keeper = process.connect();
  JournalFile file = create(keeper, 0, "start");
  CHECK(file.append(bytes_of("one")));
  KeeperClient next_owner = process.connect();
  CHECK(file.checkpoint(keeper, bytes_of("late")).code() == ErrorCode::kPermissionDenied);
  CHECK(file.num_checkpoints() == 0);
  CHECK(file.num_records() == 1);
  CHECK(file.append(bytes_of("two")));
  CHECK(inode_of(kept(next_owner).get()) == inode_of(file.fd()));
  CHECK(adopt_kept(next_owner).contents.records.size() == 2);
}

// A memfd of one granule with these seals.
OwnFd memfd(int seals) {
  OwnFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(fd.get(), 4096) == 0);
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

void check_refused(OwnFd fd, ErrorCode code, const std::string& part) {
  const auto found = JournalFile::adopt(std::move(fd));
  REQUIRE(!found.ok());
  INFO(found.status().to_string());
  CHECK(found.status().code() == code);
  CHECK(found.status().message().find(part) != std::string::npos);
}

TEST_CASE("what is no sealed memfd that can be written, or no journal, is refused") {
  const ErrorCode invalid = ErrorCode::kInvalidArgument;
  check_refused(OwnFd(), invalid, "fd -1");
  check_refused(OwnFd(::open("/dev/null", O_RDWR | O_CLOEXEC)), invalid, "no memfd");
  check_refused(memfd(F_SEAL_GROW), invalid, "needs F_SEAL_SHRINK");
  check_refused(memfd(F_SEAL_SHRINK | F_SEAL_WRITE), invalid, "forbid to write");
  check_refused(memfd(F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE), invalid, "forbid to write");
  check_refused(memfd(F_SEAL_SHRINK), ErrorCode::kInternal, "magic 0x0000000000000000");
  OwnFd empty(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::fcntl(empty.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  check_refused(std::move(empty), invalid, "has 0 bytes");
  const OwnFd writable = memfd(F_SEAL_SHRINK);
  const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
  check_refused(OwnFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), invalid,
                "not open for reading and writing");
}

TEST_CASE("a damaged journal is refused, and left as it is") {
  const KeeperProcess process;
  KeeperClient keeper = process.connect();
  JournalFile file = create(keeper, 5, "state");
  CHECK(file.append(bytes_of("record")));
  const off_t at = 64 + 24 + 16;  // the first byte of "record"
  REQUIRE(::pwrite(file.fd(), "R", 1, at) == 1);
  check_refused(kept(keeper), ErrorCode::kInternal, "the record of sequence 6 at byte 88");
  REQUIRE(::pwrite(file.fd(), "r", 1, at) == 1);
  CHECK(adopt_kept(keeper).contents.records.size() == 1);
}

TEST_CASE("a checkpoint that finds no descriptor changes nothing") {
  const KeeperProcess process;
  KeeperClient keeper = process.connect();
  JournalFile file = create(keeper, 0, "start");
  CHECK(file.append(bytes_of("one")));
  std::vector<OwnFd> all;
  while (true) {
    all.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!all.back().valid()) break;
  }
  bool thrown = false;
  try {
    (void)file.checkpoint(keeper, bytes_of("late"));
  } catch (const SystemError&) {  // nothing more here: sanitizers need descriptors, too
    thrown = true;
  }
  all.clear();
  CHECK(thrown);
  CHECK(file.num_checkpoints() == 0);
  CHECK(file.append(bytes_of("two")));
  CHECK(adopt_kept(keeper).contents.records.size() == 2);
}

// A larderd whose state is the number of its last decision. It stops only when it is killed.
void decide_for_ever(const std::string& socket, std::atomic<uint64_t>& told) {
  auto keeper = KeeperClient::connect(socket);
  auto entries = keeper->list();
  auto file = [&]() -> JournalFile {
    if (!entries->empty()) return std::move(JournalFile::adopt(std::move(entries->at(0).fd))->file);
    const uint64_t zero = 0;
    return std::move(*JournalFile::create(*keeper, 0, std::as_bytes(std::span(&zero, 1))));
  }();
  while (true) {
    const uint64_t next = file.last_sequence() + 1;
    if (!file.append(std::as_bytes(std::span(&next, 1)))) ::_exit(1);
    told = next;
    const uint64_t state = next;
    if (next % 5 == 0 && !file.checkpoint(*keeper, std::as_bytes(std::span(&state, 1))).ok())
      ::_exit(1);
  }
}

uint64_t number_of(std::span<const std::byte> bytes) {
  uint64_t number = 0;
  REQUIRE(bytes.size() == sizeof number);
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

TEST_CASE("whenever a larderd is killed, the keeper has a journal of all that it told") {
  const KeeperProcess process;
  const Shared<std::atomic<uint64_t>> told;
  auto engine = test::random_engine(0);
  for (int round = 0; round < 60; ++round) {
    {
      const Child larderd([&] { decide_for_ever(process.socket(), *told.operator->()); });
      const uint64_t until = told->load() + 1 + engine() % 100;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (told->load() < until && std::chrono::steady_clock::now() < deadline) ::sched_yield();
      REQUIRE(told->load() >= until);
    }
    // As the next larderd, in a child of its own so that this process never becomes the owner.
    const Shared<std::atomic<int>> verdict;
    const Child next([&] {
      auto keeper = KeeperClient::connect(process.socket());
      const JournalFile::Found found = adopt_kept(*keeper);
      const JournalContents& contents = found.contents;
      bool whole = number_of(contents.snapshot) == contents.snapshot_sequence;
      for (size_t i = 0; i < contents.records.size(); ++i)
        whole = whole && number_of(contents.records[i]) == contents.snapshot_sequence + 1 + i;
      *verdict.operator->() = whole && contents.last_sequence >= told->load() ? 1 : 2;
    });
    REQUIRE(test::eventually([&] { return verdict->load() != 0; }));
    REQUIRE(verdict->load() == 1);
  }
}

}  // namespace
}  // namespace larder::daemon
