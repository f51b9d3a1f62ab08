#include "protocol/channel.h"

#include <algorithm>
#include <cstring>
#include <sys/resource.h>
#include <thread>

#include <doctest/doctest.h>

#include "larder/system_error.h"
#include "protocol/limits.h"
#include "tests/protocol/socket_pair.h"

namespace larder::protocol {
namespace {

using namespace std::chrono_literals;
using test::new_fds;
using test::numbers;
using test::open_fds;
using test::socket_pair;
using test::SocketPair;
using Kind = Received::Kind;

std::vector<std::byte> bytes_of(size_t size, int value = 7) {
  return std::vector<std::byte>(size, static_cast<std::byte>(value));
}

std::vector<int> first(const std::vector<OwnFd>& fds, size_t count) {
  std::vector<int> result = numbers(fds);
  result.resize(count);
  return result;
}

Deadline soon() { return std::chrono::steady_clock::now() + 20ms; }
Deadline later() { return std::chrono::steady_clock::now() + 10s; }

// What send() refuses to do: any size, any number of fds.
ssize_t send_raw(int socket, std::span<const std::byte> bytes, std::span<const int> fds = {}) {
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(253 * sizeof(int))> control{};
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL);
}

void check_usable(const SocketPair& pair) {
  for (const auto& [from, to] :
       {std::pair(pair.a.get(), pair.b.get()), std::pair(pair.b.get(), pair.a.get())}) {
    const auto fds = new_fds(2);
    CHECK(send(from, bytes_of(16, 3), numbers(fds)) == Sent::kSent);
    const Received received = receive(to);
    CHECK(received.kind == Kind::kMessage);
    CHECK(received.bytes == bytes_of(16, 3));
    CHECK(received.fds.size() == 2);
  }
}

void check_refused(const Received& received, const std::string& part) {
  CHECK(received.kind == Kind::kRefused);
  CHECK(received.status.code() == ErrorCode::kInvalidArgument);
  CAPTURE(received.status.to_string());
  CHECK(received.status.message().find(part) != std::string::npos);
  CHECK(received.bytes.empty());
  CHECK(received.fds.empty());
}

TEST_CASE("a message arrives with its fds, which are close-on-exec and the same files") {
  const auto before = open_fds();
  {
    const SocketPair pair = socket_pair();
    for (const size_t count : {0, 1, 64}) {
      CAPTURE(count);
      const auto fds = new_fds(count);
      CHECK(send(pair.a.get(), bytes_of(8 + count), numbers(fds)) == Sent::kSent);
      const Received received = receive(pair.b.get());
      CHECK(received.kind == Kind::kMessage);
      CHECK(received.bytes == bytes_of(8 + count));
      REQUIRE(received.fds.size() == count);
      for (size_t i = 0; i < count; ++i) {
        struct stat sent {};
        struct stat got {};
        CHECK(::fstat(fds[i].get(), &sent) == 0);
        CHECK(::fstat(received.fds[i].get(), &got) == 0);
        CHECK(sent.st_ino == got.st_ino);
        CHECK((::fcntl(received.fds[i].get(), F_GETFD) & FD_CLOEXEC) != 0);
      }
    }
  }
  CHECK(open_fds() == before);
}

TEST_CASE("messages keep their boundaries, their order and their own fds") {
  const SocketPair pair = socket_pair();
  const auto fds = new_fds(3);
  for (size_t i = 0; i < 3; ++i)
    CHECK(send(pair.a.get(), bytes_of(8 * (i + 1)), std::vector<int>(i, fds[0].get())) ==
          Sent::kSent);
  for (size_t i = 0; i < 3; ++i) {
    const Received received = receive(pair.b.get());
    CHECK(received.bytes.size() == 8 * (i + 1));
    CHECK(received.fds.size() == i);
  }
  CHECK(receive(pair.b.get()).kind == Kind::kNothing);
}

TEST_CASE("the largest message fits through a prepared socket, with all its fds") {
  const SocketPair pair = socket_pair();
  const auto fds = new_fds(kMaxFdsPerMessage);
  CHECK(send(pair.a.get(), bytes_of(kMaxMessageBytes), numbers(fds)) == Sent::kSent);
  const Received received = receive(pair.b.get());
  CHECK(received.bytes == bytes_of(kMaxMessageBytes));
  CHECK(received.fds.size() == kMaxFdsPerMessage);
}

TEST_CASE("a message longer than the limit is refused and the connection lives on") {
  const SocketPair pair = socket_pair();
  const auto fds = new_fds(2);
  const auto before = open_fds();
  CHECK(send_raw(pair.a.get(), bytes_of(kMaxMessageBytes + 8), numbers(fds)) > 0);
  check_refused(receive(pair.b.get()), std::to_string(kMaxMessageBytes));
  CHECK(open_fds() == before);
  check_usable(pair);
}

TEST_CASE("too many fds in one message are refused, none leaks, and the connection lives on") {
  const SocketPair pair = socket_pair();
  for (const bool credentials : {false, true}) {
    const int on = credentials ? 1 : 0;
    REQUIRE(::setsockopt(pair.b.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
    for (const size_t count : {65, 66, 72, 253}) {
      CAPTURE(count);
      const auto fds = new_fds(count);
      const auto before = open_fds();
      REQUIRE(send_raw(pair.a.get(), bytes_of(8), numbers(fds)) == 8);
      check_refused(receive(pair.b.get()), "at most 64");
      CHECK(open_fds() == before);
    }
    check_usable(pair);
  }
}

TEST_CASE("credentials in front of the fds change nothing") {
  const SocketPair pair = socket_pair();
  const int on = 1;
  for (const int socket : {pair.a.get(), pair.b.get()})
    REQUIRE(::setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
  const auto fds = new_fds(kMaxFdsPerMessage);
  for (const size_t count : {size_t{0}, size_t{1}, kMaxFdsPerMessage}) {
    CHECK(send(pair.a.get(), bytes_of(8), first(fds, count)) == Sent::kSent);
    const Received received = receive(pair.b.get());
    CHECK(received.kind == Kind::kMessage);
    CHECK(received.fds.size() == count);
  }
}

// Leaves `count` free descriptors while it lives.
class FdLimit {
 public:
  explicit FdLimit(int count) {
    LARDER_CHECK(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const auto fds = open_fds();
    int limit = 0;
    for (int left = count; left >= 0; ++limit)
      if (std::find(fds.begin(), fds.end(), limit) == fds.end()) --left;
    const rlimit now{static_cast<rlim_t>(limit - 1), before_.rlim_max};
    LARDER_CHECK(::setrlimit(RLIMIT_NOFILE, &now) == 0);
  }
  ~FdLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FdLimit(const FdLimit&) = delete;
  FdLimit& operator=(const FdLimit&) = delete;

 private:
  rlimit before_{};
};

TEST_CASE("a receiver with too few free descriptors refuses, leaks nothing and goes on") {
  const SocketPair pair = socket_pair();
  const auto fds = new_fds(10);
  const auto before = open_fds();
  {
    const FdLimit limit(3);
    for (int round = 0; round < 3; ++round) {
      CHECK(send(pair.a.get(), bytes_of(8), numbers(fds)) == Sent::kSent);
      check_refused(receive(pair.b.get()), "3 arrived");
    }
    CHECK(send(pair.a.get(), bytes_of(8), first(fds, 3)) == Sent::kSent);
    CHECK(receive(pair.b.get()).fds.size() == 3);
  }
  CHECK(open_fds() == before);
  check_usable(pair);
}

TEST_CASE("an empty message is refused, the end of the connection is not one") {
  const SocketPair pair = socket_pair();
  const auto fds = new_fds(2);
  const auto before = open_fds();
  CHECK(send_raw(pair.a.get(), {}) == 0);
  check_refused(receive(pair.b.get()), "empty");
  CHECK(send_raw(pair.a.get(), {}, numbers(fds)) == 0);
  check_refused(receive(pair.b.get()), "empty");
  CHECK(open_fds() == before);
  check_usable(pair);
}

TEST_CASE("what was sent before the end arrives before the end") {
  SocketPair pair = socket_pair();
  CHECK(send(pair.a.get(), bytes_of(8)) == Sent::kSent);
  SUBCASE("closed") { pair.a.reset(); }
  SUBCASE("closed for writing alone") { CHECK(::shutdown(pair.a.get(), SHUT_WR) == 0); }
  CHECK(receive(pair.b.get()).kind == Kind::kMessage);
  for (int i = 0; i < 2; ++i) CHECK(receive(pair.b.get()).kind == Kind::kEnd);
}

TEST_CASE("the last message of a peer that closed with ours unread still arrives") {
  SocketPair pair = socket_pair();
  CHECK(send(pair.b.get(), bytes_of(8)) == Sent::kSent);
  const auto fds = new_fds(1);
  CHECK(send(pair.a.get(), bytes_of(24), numbers(fds)) == Sent::kSent);
  pair.a.reset();
  SUBCASE("received") {}
  SUBCASE("received after a failed send") {
    CHECK(send(pair.b.get(), bytes_of(8)) == Sent::kClosed);
  }
  const Received last = receive(pair.b.get());
  CHECK(last.kind == Kind::kMessage);
  CHECK(last.bytes.size() == 24);
  CHECK(last.fds.size() == 1);
  CHECK(receive(pair.b.get()).kind == Kind::kEnd);
}

TEST_CASE("sending to a peer that is gone says so and raises no signal") {
  SocketPair pair = socket_pair();
  const auto fds = new_fds(1);
  pair.a.reset();
  CHECK(send(pair.b.get(), bytes_of(8)) == Sent::kClosed);
  CHECK(send(pair.b.get(), bytes_of(8), numbers(fds)) == Sent::kClosed);
  CHECK(send_before(pair.b.get(), bytes_of(8), {}, later()).code() == ErrorCode::kUnavailable);
  CHECK(receive_before(pair.b.get(), later()).status().code() == ErrorCode::kUnavailable);
}

TEST_CASE("fds that nobody received are closed with the connection") {
  const auto before = open_fds();
  {
    SocketPair pair = socket_pair();
    std::array<int, 2> pipe{};
    REQUIRE(::pipe2(pipe.data(), O_CLOEXEC) == 0);
    const OwnFd reader(pipe[0]);
    OwnFd writer(pipe[1]);
    CHECK(send(pair.a.get(), bytes_of(8), std::array{writer.get()}) == Sent::kSent);
    writer.reset();
    pair.a.reset();
    pair.b.reset();
    char byte = 0;
    CHECK(::read(reader.get(), &byte, 1) == 0);  // the last writer is gone
  }
  CHECK(open_fds() == before);
}

TEST_CASE("a full socket takes nothing until the peer reads") {
  const SocketPair pair = socket_pair();
  const auto fds = new_fds(1);
  size_t num_sent = 0;
  while (num_sent < 10'000 &&
         send(pair.a.get(), bytes_of(kMaxMessageBytes), numbers(fds)) == Sent::kSent)
    ++num_sent;
  CHECK(num_sent >= 2);
  CHECK(num_sent < 100);
  CHECK(send(pair.a.get(), bytes_of(kMaxMessageBytes)) == Sent::kFull);
  CHECK(send_before(pair.a.get(), bytes_of(kMaxMessageBytes), {}, soon()).code() ==
        ErrorCode::kDeadlineExceeded);
  for (size_t i = 0; i < num_sent; ++i) CHECK(receive(pair.b.get()).fds.size() == 1);
  CHECK(receive(pair.b.get()).kind == Kind::kNothing);
  CHECK(send(pair.a.get(), bytes_of(8)) == Sent::kSent);
}

TEST_CASE("waiting ends at the deadline, at once when it has passed") {
  const SocketPair pair = socket_pair();
  const auto start = std::chrono::steady_clock::now();
  CHECK(receive_before(pair.b.get(), start - 1s).status().code() == ErrorCode::kDeadlineExceeded);
  CHECK(receive_before(pair.b.get(), start + 20ms).status().code() == ErrorCode::kDeadlineExceeded);
  const auto waited = std::chrono::steady_clock::now() - start;
  CHECK(waited >= 20ms);
  CHECK(waited < 5s);
}

TEST_CASE("what is there already is taken even when the deadline has passed") {
  const SocketPair pair = socket_pair();
  CHECK(send(pair.a.get(), bytes_of(8)) == Sent::kSent);
  CHECK(receive_before(pair.b.get(), Deadline::min() + 1s).ok());
}

TEST_CASE("waiting without a deadline ends when a message or the end comes") {
  SocketPair pair = socket_pair();
  std::thread peer([&] {
    (void)receive_before(pair.a.get(), Deadline::max());
    CHECK(send_before(pair.a.get(), bytes_of(16), {}, Deadline::max()).ok());
    pair.a.reset();
  });
  CHECK(send_before(pair.b.get(), bytes_of(8), {}, Deadline::max()).ok());
  const auto received = receive_before(pair.b.get(), Deadline::max());
  REQUIRE(received.ok());
  CHECK(received->bytes.size() == 16);
  CHECK(receive_before(pair.b.get(), Deadline::max()).status().code() == ErrorCode::kUnavailable);
  peer.join();
}

TEST_CASE("a refused message is the answer of a waiting call") {
  const SocketPair pair = socket_pair();
  CHECK(send_raw(pair.a.get(), {}) == 0);
  CHECK(receive_before(pair.b.get(), later()).status().code() == ErrorCode::kInvalidArgument);
  check_usable(pair);
}

TEST_CASE("a waiting send answers what cannot be sent with the numbers") {
  const SocketPair pair = socket_pair();
  const auto fds = new_fds(1);
  const auto status = [&](size_t size, size_t num_fds) {
    return send_before(pair.a.get(), bytes_of(size), std::vector<int>(num_fds, fds[0].get()),
                       later());
  };
  CHECK(status(kMaxMessageBytes + 8, 0).message().starts_with("a message of 131080 bytes"));
  CHECK(status(0, 0).code() == ErrorCode::kInvalidArgument);
  CHECK(status(8, 65).message().find("65 fds") != std::string::npos);
  CHECK(status(8, 64).ok());
}

TEST_CASE("errors that are not the peer's doing are thrown") {
  const OwnFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  CHECK_THROWS_AS(receive(file.get()), SystemError);
  CHECK_THROWS_AS((void)send(file.get(), bytes_of(8)), SystemError);
  CHECK_THROWS_AS(prepare_socket(file.get()), SystemError);
  const SocketPair pair = socket_pair();
  const auto before = open_fds();
  CHECK_THROWS_AS((void)send(pair.a.get(), bytes_of(8), std::array{-1}), SystemError);
  CHECK(open_fds() == before);
}

TEST_CASE("connections that come and go in every way leave nothing behind") {
  const auto before = open_fds();
  const auto message = bytes_of(64);
  for (int round = 0; round < 1000; ++round) {
    SocketPair pair = socket_pair();
    const auto fds = new_fds(2);
    if ((round & 1) != 0) (void)send(pair.a.get(), message, numbers(fds));
    if ((round & 2) != 0) (void)send(pair.b.get(), message, numbers(fds));
    if ((round & 4) != 0) ::shutdown(pair.a.get(), SHUT_WR);
    if ((round & 8) != 0) ::shutdown(pair.a.get(), SHUT_RDWR);
    if ((round & 16) != 0) pair.a.reset();
    const Kind first = receive(pair.b.get()).kind;
    (void)send(pair.b.get(), message, numbers(fds));
    const Kind second = receive(pair.b.get()).kind;
    if (first == Kind::kEnd) CHECK(second == Kind::kEnd);
  }
  CHECK(open_fds() == before);
}

}  // namespace
}  // namespace larder::protocol
