// Connecting by path, and every reason why that fails.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <doctest/doctest.h>

#include "protocol/channel.h"
#include "protocol/limits.h"
#include "tests/protocol/socket_pair.h"

namespace larder::protocol {
namespace {

using namespace std::chrono_literals;

class Folder {
 public:
  Folder() {
    std::string name = "/tmp/larder-connect-XXXXXX";
    LARDER_CHECK(::mkdtemp(name.data()) != nullptr);
    path_ = name;
    std::filesystem::permissions(path_, std::filesystem::perms(0755));
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

OwnFd bound_socket(const std::string& path, int type = SOCK_SEQPACKET) {
  OwnFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  LARDER_CHECK(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) ==
               0);
  return socket;
}

Result<OwnFd> connect_to(const std::string& path) {
  return connect_before(path, std::chrono::steady_clock::now() + 50ms);
}

void check_refused(const Result<OwnFd>& result, ErrorCode code, const std::string& part) {
  CAPTURE(result.status().to_string());
  CHECK(result.status().code() == code);
  CHECK(result.status().message().find(part) != std::string::npos);
}

TEST_CASE("a connection by path carries messages both ways") {
  const Folder folder;
  const OwnFd listener = bound_socket(folder / "socket");
  REQUIRE(::listen(listener.get(), 4) == 0);
  auto client = connect_to(folder / "socket");
  REQUIRE(client.ok());
  const OwnFd server(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  prepare_socket(server.get());
  const std::vector<std::byte> message(kSocketBufferBytes / 4, std::byte{1});
  CHECK(send(client->get(), message) == Sent::kSent);
  CHECK(receive(server.get()).bytes == message);
  CHECK(send(server.get(), message) == Sent::kSent);
  CHECK(receive(client->get()).bytes == message);
}

TEST_CASE("a path that no socket can have is refused") {
  const auto before = test::open_fds();
  check_refused(connect_to(""), ErrorCode::kInvalidArgument, "0 bytes, 1 to 107");
  check_refused(connect_to("/tmp/" + std::string(103, 'x')), ErrorCode::kInvalidArgument,
                "108 bytes, 1 to 107");
  check_refused(connect_to("/tmp/" + std::string(102, 'x')), ErrorCode::kUnavailable,
                "not running");
  check_refused(connect_to(std::string("\0name", 5)), ErrorCode::kInvalidArgument, "zero byte");
  check_refused(connect_to(std::string("/tmp/a\0b", 8)), ErrorCode::kInvalidArgument, "zero byte");
  CHECK(test::open_fds() == before);
}

TEST_CASE("a daemon that is not there is told from a file that is no socket of ours") {
  const Folder folder;
  check_refused(connect_to(folder / "missing"), ErrorCode::kUnavailable, "there is no socket");
  check_refused(connect_to(folder / "missing/socket"), ErrorCode::kUnavailable,
                "there is no socket");
  bound_socket(folder / "stale").reset();
  check_refused(connect_to(folder / "stale"), ErrorCode::kUnavailable, "stale");
  const OwnFd silent = bound_socket(folder / "silent");  // not listening
  check_refused(connect_to(folder / "silent"), ErrorCode::kUnavailable, "stale");
  std::ofstream(folder / "file") << "text";
  check_refused(connect_to(folder / "file"), ErrorCode::kUnavailable, "no socket");
  check_refused(connect_to(folder / "file/socket"), ErrorCode::kInvalidArgument, "not a");
  std::filesystem::create_directory(folder / "directory");
  check_refused(connect_to(folder / "directory"), ErrorCode::kUnavailable, "no socket");
  const OwnFd stream = bound_socket(folder / "stream", SOCK_STREAM);
  REQUIRE(::listen(stream.get(), 1) == 0);
  check_refused(connect_to(folder / "stream"), ErrorCode::kInvalidArgument, "SOCK_SEQPACKET");
}

TEST_CASE("a full backlog is waited for until the deadline") {
  const Folder folder;
  const OwnFd listener = bound_socket(folder / "socket");
  REQUIRE(::listen(listener.get(), 1) == 0);
  std::vector<OwnFd> waiting;
  Result<OwnFd> last = connect_to(folder / "socket");
  while (last.ok() && waiting.size() < 10) {
    waiting.push_back(std::move(*last));
    last = connect_to(folder / "socket");
  }
  check_refused(last, ErrorCode::kDeadlineExceeded, "backlog");
  const OwnFd accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(connect_to(folder / "socket").ok());
}

// Runs `act` in a child with no privileges and returns its answer.
bool as_nobody(const std::function<bool()>& act) {
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && (::setresgid(kNobody, kNobody, kNobody) != 0 ||
                             ::setresuid(kNobody, kNobody, kNobody) != 0))
      ::_exit(2);
    ::_exit(act() ? 0 : 1);
  }
  int status = 0;
  LARDER_CHECK(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_CASE("a socket that we may not use is named with its group") {
  const Folder folder;
  const OwnFd listener = bound_socket(folder / "socket");
  REQUIRE(::listen(listener.get(), 1) == 0);
  const auto says = [&](const std::string& path, const std::string& part) {
    return as_nobody([&] {
      const auto result = connect_to(path);
      return result.status().code() == ErrorCode::kPermissionDenied &&
             result.status().message().find(part) != std::string::npos;
    });
  };
  REQUIRE(::chmod((folder / "socket").c_str(), 0) == 0);
  CHECK(says(folder / "socket", folder / "socket is group "));
  REQUIRE(::mkdir((folder / "closed").c_str(), 0) == 0);
  CHECK(says(folder / "closed/socket", "directory"));
}

}  // namespace
}  // namespace larder::protocol
