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

char content_of(const OwnFd& fd) {
  char byte = 0;
  REQUIRE(::pread(fd.get(), &byte, 1, 0) == 1);
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
  const auto first = owner.ask(KeeperOp::kList, 0);
  CHECK(first.reply.key == 3);
  CHECK(first.reply.metadata[0] == 30);
  CHECK(content_of(first.fd) == 'a');
  const auto second = owner.ask(KeeperOp::kList, 4);
  CHECK(second.reply.key == 7);
  CHECK(second.reply.metadata[0] == 71);
  CHECK(content_of(second.fd) == 'c');
  CHECK(owner.ask(KeeperOp::kList, 8).reply.code == static_cast<uint32_t>(ErrorCode::kNotFound));
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
  CHECK(content_of(next.ask(KeeperOp::kList, 0).fd) == 'a');  // and the memory is still there
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
  CHECK(static_cast<ErrorCode>(owner.ask(static_cast<KeeperOp>(99), 1).reply.code) ==
        ErrorCode::kInvalidArgument);
  KeeperRequest request;
  request.magic = 0;
  CHECK(static_cast<ErrorCode>(keeper.handle(owner.asker(), request, {}).reply.code) ==
        ErrorCode::kInvalidArgument);
  CHECK(count_fds() == before);
}

}  // namespace
}  // namespace larder::daemon
