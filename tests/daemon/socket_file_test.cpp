#include "daemon/socket_file.h"

#include <fcntl.h>
#include <filesystem>
#include <future>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "protocol/channel.h"
#include "tests/support/process.h"

namespace larder::daemon {
namespace {

using test::TemporaryFolder;

TEST_CASE("a bound path is connected to, and its files go with the object") {
  const TemporaryFolder folder;
  const std::string path = folder.file("s.sock");
  {
    auto file = SocketFile::bind(path);
    REQUIRE(file.ok());
    auto peer =
        protocol::connect_before(path, std::chrono::steady_clock::now() + std::chrono::seconds(5));
    CHECK(peer.ok());
    auto second = SocketFile::bind(path);
    REQUIRE(!second.ok());
    CHECK(second.status().code() == ErrorCode::kBusy);
    CHECK(second.status().message().find(std::to_string(::getpid())) != std::string::npos);
  }
  CHECK(!std::filesystem::exists(path));
  CHECK(!std::filesystem::exists(path + ".lock"));
  CHECK(SocketFile::bind(path).ok());
}

TEST_CASE("a stale socket is replaced, a live one without a lock is not") {
  const TemporaryFolder folder;
  const std::string path = folder.file("s.sock");
  {
    auto file = SocketFile::bind(path);
    REQUIRE(file.ok());
    // As after a SIGKILL: the names outlive their owner.
    std::filesystem::create_hard_link(path, path + ".kept");
  }
  std::filesystem::rename(path + ".kept", path);
  CHECK(SocketFile::bind(path).ok());

  auto live = SocketFile::bind(path);
  REQUIRE(live.ok());
  std::filesystem::remove(path + ".lock");
  auto second = SocketFile::bind(path);
  REQUIRE(!second.ok());
  CHECK(second.status().code() == ErrorCode::kBusy);
}

TEST_CASE("what a killed process's new child holds until its exec is waited for") {
  const TemporaryFolder folder;
  const std::string path = folder.file("s.sock");
  int holds[2];
  REQUIRE(::pipe2(holds, O_CLOEXEC) == 0);
  const pid_t owner = ::fork();
  REQUIRE(owner >= 0);
  if (owner == 0) {
    auto file = SocketFile::bind(path);
    ::close(holds[1]);
    if (::fork() == 0) {
      char end;
      ::_exit(static_cast<int>(::read(holds[0], &end, 1)));  // once the other end is closed
    }
    ::_exit(file.ok() ? 0 : 1);
  }
  int ended = 0;
  REQUIRE(::waitpid(owner, &ended, 0) == owner);
  REQUIRE(ended == 0);
  auto next = std::async(std::launch::async, [&] { return SocketFile::bind(path).ok(); });
  CHECK(next.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout);
  ::close(holds[1]);
  CHECK(next.get());
  ::close(holds[0]);
}

TEST_CASE("paths that cannot be are refused") {
  const TemporaryFolder folder;
  CHECK(SocketFile::bind("").status().code() == ErrorCode::kInvalidArgument);
  auto too_long = SocketFile::bind(folder.file(std::string(120, 'x')));
  CHECK(too_long.status().code() == ErrorCode::kInvalidArgument);
  CHECK(too_long.status().message().find("107") != std::string::npos);
  std::filesystem::create_directory(folder.file("d.sock"));
  CHECK(SocketFile::bind(folder.file("d.sock")).status().code() == ErrorCode::kInvalidArgument);
  auto no_group = SocketFile::bind(folder.file("g.sock"), 0660, "no-such-group-here");
  CHECK(no_group.status().code() == ErrorCode::kInvalidArgument);
  CHECK(no_group.status().message().find("no-such-group-here") != std::string::npos);
}

}  // namespace
}  // namespace larder::daemon
