#include "daemon/keeper.h"

#include <fcntl.h>
#include <filesystem>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

namespace larder::daemon {
namespace {

using protocol::KeeperOp;
using protocol::KeeperRequest;

OwnFd make_fd(char content) {
  OwnFd fd(::memfd_create("test", MFD_CLOEXEC));
  REQUIRE(::write(fd.get(), &content, 1) == 1);
  return fd;
}

char content_of(int fd) {
  char byte = 0;
  REQUIRE(::pread(fd, &byte, 1, 0) == 1);
  return byte;
}

OwnFd pidfd_of(pid_t pid) { return OwnFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }

// A keeper and the requests of one owner.
struct Owner {
  Keeper& keeper;
  int connection;
  pid_t pid = ::getpid();
  OwnFd pidfd = pidfd_of(pid);
  uint64_t epoch = 0;

  Keeper::Asker asker() const { return {connection, pid, pidfd.get()}; }

  ErrorCode hello() {
    const auto answer = keeper.handle(asker(), {}, {});
    epoch = answer.reply.epoch;
    return static_cast<ErrorCode>(answer.reply.code);
  }
  Keeper::Answer ask(KeeperOp op, uint64_t key, std::vector<OwnFd> fds = {}, uint8_t mark = 0) {
    KeeperRequest request{protocol::kKeeperMagic, op, epoch, key, {}};
    request.metadata[0] = mark;
    return keeper.handle(asker(), request, std::move(fds));
  }
  ErrorCode put(uint64_t key, char content, uint8_t mark = 0) {
    std::vector<OwnFd> fds;
    fds.push_back(make_fd(content));
    return static_cast<ErrorCode>(ask(KeeperOp::kPut, key, std::move(fds), mark).reply.code);
  }
  ErrorCode drop(uint64_t key) {
    return static_cast<ErrorCode>(ask(KeeperOp::kDrop, key).reply.code);
  }
};

TEST_CASE("what was put is listed in key order with its metadata and its fd") {
  Keeper keeper;
  Owner owner{keeper, 1};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  CHECK(owner.put(7, 'b', 70) == ErrorCode::kOk);
  CHECK(owner.put(3, 'a', 30) == ErrorCode::kOk);
  CHECK(owner.put(7, 'c', 71) == ErrorCode::kOk);  // replaces
  CHECK(keeper.num_entries() == 2);
  const auto all = owner.ask(KeeperOp::kList, 0);
  REQUIRE(all.reply.num_listed == 2);
  REQUIRE(all.fds.size() == 2);
  CHECK(all.reply.listed[0].key == 3);
  CHECK(all.reply.listed[0].metadata[0] == 30);
  CHECK(content_of(all.fds[0]) == 'a');
  CHECK(all.reply.listed[1].key == 7);
  CHECK(all.reply.listed[1].metadata[0] == 71);
  CHECK(content_of(all.fds[1]) == 'c');
  const auto some = owner.ask(KeeperOp::kList, 4);
  CHECK(some.reply.num_listed == 1);
  CHECK(some.reply.listed[0].key == 7);
  const auto none = owner.ask(KeeperOp::kList, 8);
  CHECK(none.reply.code == 0);
  CHECK(none.reply.num_listed == 0);
  CHECK(none.fds.empty());
  CHECK(owner.drop(3) == ErrorCode::kOk);
  CHECK(owner.drop(3) == ErrorCode::kNotFound);
  CHECK(keeper.num_entries() == 1);
}

TEST_CASE("requests before hello, of another connection or of an old epoch change nothing") {
  Keeper keeper;
  Owner owner{keeper, 1};
  CHECK(owner.put(1, 'a') == ErrorCode::kPermissionDenied);
  REQUIRE(owner.hello() == ErrorCode::kOk);
  Owner other{keeper, 2, ::getpid(), pidfd_of(::getpid()), owner.epoch};
  CHECK(other.put(1, 'a') == ErrorCode::kPermissionDenied);
  const uint64_t old_epoch = owner.epoch;
  REQUIRE(owner.hello() == ErrorCode::kOk);
  CHECK(owner.epoch > old_epoch);
  owner.epoch = old_epoch;
  CHECK(owner.put(1, 'a') == ErrorCode::kPermissionDenied);
  CHECK(keeper.num_entries() == 0);
}

TEST_CASE("a new owner is admitted only when the old one's process is gone") {
  Keeper keeper;
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  Owner old_owner{keeper, 1, child, pidfd_of(child)};
  REQUIRE(old_owner.hello() == ErrorCode::kOk);
  REQUIRE(old_owner.put(1, 'a') == ErrorCode::kOk);
  Owner next{keeper, 2};
  CHECK(next.hello() == ErrorCode::kBusy);
  keeper.connection_closed(1);
  CHECK(next.hello() == ErrorCode::kBusy);  // the process may still act on what it knows
  ::kill(child, SIGKILL);
  siginfo_t info{};
  REQUIRE(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
  CHECK(next.hello() == ErrorCode::kOk);
  ::waitpid(child, nullptr, 0);
  CHECK(content_of(next.ask(KeeperOp::kList, 0).fds.at(0)) ==
        'a');  // and the memory is still there
}

TEST_CASE("the owner itself may come back on a new connection") {
  Keeper keeper;
  Owner owner{keeper, 1};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  REQUIRE(owner.put(1, 'a') == ErrorCode::kOk);
  Owner again{keeper, 2};
  CHECK(again.hello() == ErrorCode::kOk);
  CHECK(again.put(2, 'b') == ErrorCode::kOk);
  CHECK(owner.put(3, 'c') == ErrorCode::kPermissionDenied);
}

TEST_CASE("malformed records are refused and leak no fd") {
  const auto count_fds = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  Keeper keeper;
  Owner owner{keeper, 1};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  const auto before = count_fds();
  CHECK(static_cast<ErrorCode>(owner.ask(KeeperOp::kPut, 1).reply.code) ==
        ErrorCode::kInvalidArgument);
  std::vector<OwnFd> two;
  two.push_back(make_fd('a'));
  two.push_back(make_fd('b'));
  CHECK(static_cast<ErrorCode>(owner.ask(KeeperOp::kPut, 1, std::move(two)).reply.code) ==
        ErrorCode::kInvalidArgument);
  for (const KeeperOp op : {KeeperOp::kHello, KeeperOp::kDrop, KeeperOp::kList}) {
    std::vector<OwnFd> one;
    one.push_back(make_fd('a'));
    CHECK(static_cast<ErrorCode>(owner.ask(op, 1, std::move(one)).reply.code) ==
          ErrorCode::kInvalidArgument);
  }
  for (const auto op : {KeeperOp{0}, KeeperOp{99}})
    CHECK(static_cast<ErrorCode>(owner.ask(op, 1).reply.code) == ErrorCode::kInvalidArgument);
  KeeperRequest request;
  request.magic = 0;
  CHECK(static_cast<ErrorCode>(keeper.handle(owner.asker(), request, {}).reply.code) ==
        ErrorCode::kInvalidArgument);
  CHECK(count_fds() == before);
}

TEST_CASE("a full keeper takes no new key, but replaces, and takes one for one that is dropped") {
  Keeper keeper(3);
  Owner owner{keeper, 1};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  for (uint64_t key = 1; key <= 3; ++key) REQUIRE(owner.put(key, 'a') == ErrorCode::kOk);
  CHECK(owner.put(4, 'd') == ErrorCode::kResourceExhausted);
  CHECK(owner.put(2, 'b') == ErrorCode::kOk);
  CHECK(keeper.num_entries() == 3);
  CHECK(content_of(owner.ask(KeeperOp::kList, 2).fds.at(0)) == 'b');
  CHECK(owner.drop(1) == ErrorCode::kOk);
  CHECK(owner.put(4, 'd') == ErrorCode::kOk);
  CHECK(owner.ask(KeeperOp::kList, 4).reply.num_listed == 1);
}

TEST_CASE("entries are listed a message's worth at a time") {
  constexpr uint64_t kMany = protocol::kMaxKeeperEntriesPerList;
  Keeper keeper;
  Owner owner{keeper, 1};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  for (uint64_t key = 0; key <= kMany; ++key)
    REQUIRE(owner.put(key * 10, 'a', static_cast<uint8_t>(key)) == ErrorCode::kOk);
  const auto first = owner.ask(KeeperOp::kList, 0);
  REQUIRE(first.reply.num_listed == kMany);
  for (uint64_t i = 0; i < kMany; ++i) {
    CHECK(first.reply.listed[i].key == i * 10);
    CHECK(first.reply.listed[i].metadata[0] == i);
  }
  const auto rest = owner.ask(KeeperOp::kList, first.reply.listed.back().key + 1);
  REQUIRE(rest.reply.num_listed == 1);
  CHECK(rest.reply.listed[0].key == kMany * 10);
}

TEST_CASE("what was replaced or dropped is handed out, to be closed when there is time") {
  Keeper keeper;
  Owner owner{keeper, 1};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  REQUIRE(owner.put(1, 'a') == ErrorCode::kOk);
  std::vector<OwnFd> fds;
  fds.push_back(make_fd('b'));
  const auto replaced = owner.ask(KeeperOp::kPut, 1, std::move(fds));
  CHECK(content_of(replaced.dropped.get()) == 'a');
  const auto dropped = owner.ask(KeeperOp::kDrop, 1);
  CHECK(content_of(dropped.dropped.get()) == 'b');
  CHECK(!owner.ask(KeeperOp::kDrop, 1).dropped.valid());
}

TEST_CASE("processes whose pid cannot be seen are not taken for one another") {
  Keeper keeper;
  Owner owner{keeper, 1, 0, pidfd_of(::getpid())};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  Owner other{keeper, 2, 0, pidfd_of(::getpid())};
  CHECK(other.hello() == ErrorCode::kBusy);
  CHECK(owner.hello() == ErrorCode::kOk);  // on its own connection it may say hello again
  keeper.connection_closed(1);
  CHECK(other.hello() == ErrorCode::kBusy);  // the pidfd still says that it lives
}

TEST_CASE("without a pidfd the owner is the owner until its connection closes") {
  Keeper keeper;
  Owner owner{keeper, 1, 100, OwnFd()};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  Owner other{keeper, 2, 200, OwnFd()};
  CHECK(other.hello() == ErrorCode::kBusy);
  keeper.connection_closed(1);
  CHECK(other.hello() == ErrorCode::kOk);
}

TEST_CASE("a refused hello changes nothing") {
  Keeper keeper;
  Owner owner{keeper, 1};
  REQUIRE(owner.hello() == ErrorCode::kOk);
  Owner other{keeper, 2, ::getpid() + 1};
  const auto answer = keeper.handle(other.asker(), {}, {});
  CHECK(static_cast<ErrorCode>(answer.reply.code) == ErrorCode::kBusy);
  CHECK(answer.reply.epoch == 0);
  CHECK(owner.put(1, 'a') == ErrorCode::kOk);
}

TEST_CASE("keys carry a kind and an id") {
  using protocol::keeper_id;
  using protocol::keeper_key;
  using protocol::keeper_kind;
  using protocol::KeeperKind;
  static_assert(keeper_key(KeeperKind::kJournal, 0) == 0x0100000000000000);
  static_assert(keeper_key(KeeperKind::kCounters, 0x00FFFFFFFFFFFFFF) == 0x07FFFFFFFFFFFFFF);
  CHECK(keeper_kind(keeper_key(KeeperKind::kProcess, 77)) == KeeperKind::kProcess);
  CHECK(keeper_id(keeper_key(KeeperKind::kProcess, 77)) == 77);
  CHECK(static_cast<int>(keeper_kind(UINT64_MAX)) == 255);
  CHECK(keeper_id(UINT64_MAX) == 0x00FFFFFFFFFFFFFF);
}

}  // namespace
}  // namespace larder::daemon
