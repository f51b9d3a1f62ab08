// The keeper as a process, and clients that do not behave.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <doctest/doctest.h>

#include "protocol/limits.h"
#include "tests/daemon/keeper_process.h"

namespace larder::daemon {
namespace {

using namespace std::chrono_literals;
using protocol::keeper_key;
using protocol::KeeperKind;
using protocol::KeeperOp;
using protocol::KeeperReply;
using protocol::KeeperRequest;
using test::Child;
using test::eventually;
using test::KeeperProcess;
using test::Shared;

constexpr uint64_t kSegment1 = keeper_key(KeeperKind::kSegment, 1);

OwnFd make_fd(const std::string& content) {
  OwnFd fd(::memfd_create("test", MFD_CLOEXEC));
  REQUIRE(::write(fd.get(), content.data(), content.size()) ==
          static_cast<ssize_t>(content.size()));
  return fd;
}

std::string content_of(const OwnFd& fd) {
  std::string content(64, '\0');
  const ssize_t size = ::pread(fd.get(), content.data(), content.size(), 0);
  REQUIRE(size >= 0);
  content.resize(static_cast<size_t>(size));
  return content;
}

protocol::Deadline later() { return std::chrono::steady_clock::now() + 10s; }

std::span<const std::byte> bytes_of(const KeeperRequest& request) {
  return std::as_bytes(std::span(&request, 1));
}

// The answer's code; nothing when the keeper closes the connection instead.
std::optional<ErrorCode> ask(int socket, const KeeperRequest& request,
                             const std::vector<int>& fds = {}) {
  if (!protocol::send_before(socket, bytes_of(request), fds, later()).ok()) return std::nullopt;
  const auto received = protocol::receive_before(socket, later());
  if (!received.ok()) return std::nullopt;
  KeeperReply reply;
  REQUIRE(received->bytes.size() == sizeof reply);
  std::memcpy(&reply, received->bytes.data(), sizeof reply);
  return static_cast<ErrorCode>(reply.code);
}

bool is_closed(const OwnFd& socket) {
  pollfd entry{socket.get(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0;
}

TEST_CASE("all entries are listed with what was put, over many messages") {
  const KeeperProcess keeper;
  KeeperClient client = keeper.connect();
  CHECK(client.list()->empty());
  for (uint64_t id = 0; id < 100; ++id) {
    std::array<uint8_t, 64> metadata{};
    metadata[63] = static_cast<uint8_t>(id);
    const auto kind = id % 2 == 0 ? KeeperKind::kArena : KeeperKind::kSegment;
    const OwnFd fd = make_fd(std::to_string(id));
    REQUIRE(client.put(keeper_key(kind, id), fd.get(), metadata).ok());
  }
  CHECK(client.num_entries() == 100);
  const auto entries = client.list();
  REQUIRE(entries.ok());
  REQUIRE(entries->size() == 100);
  for (uint64_t i = 0; i < 100; ++i) {  // the segments come first
    const uint64_t id = i < 50 ? 2 * i + 1 : 2 * (i - 50);
    const KeeperClient::Entry& entry = (*entries)[i];
    CHECK(protocol::keeper_kind(entry.key) == (i < 50 ? KeeperKind::kSegment : KeeperKind::kArena));
    CHECK(protocol::keeper_id(entry.key) == id);
    CHECK(entry.metadata[63] == id);
    CHECK(content_of(entry.fd) == std::to_string(id));
  }
  // A whole number of messages, and the largest key there is.
  for (uint64_t id = 0; id < 100; ++id)
    if (id >= 31) {
      const auto kind = id % 2 == 0 ? KeeperKind::kArena : KeeperKind::kSegment;
      REQUIRE(client.drop(keeper_key(kind, id)).ok());
    }
  REQUIRE(client.put(UINT64_MAX, make_fd("last").get(), {}).ok());
  CHECK(client.list()->size() == 32);
  CHECK(client.clear().ok());
  CHECK(client.list()->empty());
}

TEST_CASE("a descriptor that is dropped or replaced is closed") {
  const KeeperProcess keeper;
  KeeperClient client = keeper.connect();
  const ptrdiff_t before = keeper.num_fds();
  std::vector<OwnFd> readers;
  for (uint64_t id = 0; id < 60; ++id) {
    std::array<int, 2> ends{};
    REQUIRE(::pipe2(ends.data(), O_CLOEXEC) == 0);
    readers.emplace_back(ends[0]);
    const OwnFd writer(ends[1]);
    REQUIRE(client.put(keeper_key(KeeperKind::kSegment, id % 30), writer.get(), {}).ok());
  }
  CHECK(client.clear().ok());
  for (const OwnFd& reader : readers) {  // its last writer is gone
    pollfd entry{reader.get(), POLLIN, 0};
    CHECK(::poll(&entry, 1, 10'000) == 1);
  }
  CHECK(keeper.num_fds() == before);
}

TEST_CASE("what is no record costs its sender the connection or an answer, and nobody else") {
  const KeeperProcess keeper;
  KeeperClient client = keeper.connect();
  REQUIRE(client.put(kSegment1, make_fd("kept").get(), {}).ok());
  const ptrdiff_t before = keeper.num_fds();

  for (const size_t size : {size_t{1}, sizeof(KeeperRequest) - 1, sizeof(KeeperRequest) + 1,
                            protocol::kMaxMessageBytes}) {
    const OwnFd raw = keeper.connect_raw();
    const std::vector<std::byte> bytes(size, std::byte{0x5A});
    REQUIRE(protocol::send_before(raw.get(), bytes, {}, later()).ok());
    CHECK(eventually([&] { return is_closed(raw); }));
  }
  {  // Refused before they are looked at: empty, too long, with more fds than a message may have.
    const OwnFd raw = keeper.connect_raw();
    const std::vector<std::byte> large(protocol::kMaxMessageBytes + 1);
    REQUIRE(::send(raw.get(), large.data(), 0, MSG_NOSIGNAL) == 0);
    REQUIRE(::send(raw.get(), large.data(), large.size(), MSG_NOSIGNAL) > 0);
    for (int i = 0; i < 2; ++i) {
      const auto answer = protocol::receive_before(raw.get(), later());
      REQUIRE(answer.ok());
      CHECK(answer->bytes.size() == sizeof(KeeperReply));
    }
    CHECK(!is_closed(raw));
  }
  {  // Records that ask for what they may not have.
    const OwnFd raw = keeper.connect_raw();
    const OwnFd fd = make_fd("x");
    KeeperRequest request;
    request.magic = 1;
    CHECK(ask(raw.get(), request) == ErrorCode::kInvalidArgument);
    request = {};
    request.op = static_cast<KeeperOp>(0xFFFFFFFF);
    CHECK(ask(raw.get(), request) == ErrorCode::kInvalidArgument);
    for (const KeeperOp op : {KeeperOp::kPut, KeeperOp::kDrop, KeeperOp::kList}) {
      request = {};
      request.op = op;
      request.epoch = 1;
      request.key = kSegment1;
      CHECK(ask(raw.get(), request) == ErrorCode::kPermissionDenied);
      CHECK(ask(raw.get(), request, {fd.get()}) == ErrorCode::kPermissionDenied);
      CHECK(ask(raw.get(), request, std::vector<int>(64, fd.get())) ==
            ErrorCode::kPermissionDenied);
    }
  }
  const auto entries = client.list();
  REQUIRE(entries.ok());
  REQUIRE(entries->size() == 1);
  CHECK(content_of((*entries)[0].fd) == "kept");
  CHECK(eventually([&] { return keeper.num_fds() == before; }));
}

TEST_CASE("a put without an fd or with several is refused and changes nothing") {
  const KeeperProcess keeper;
  const OwnFd raw = keeper.connect_raw();
  KeeperRequest request;
  REQUIRE(ask(raw.get(), request) == ErrorCode::kOk);
  request.op = KeeperOp::kPut;
  request.epoch = 1;
  const OwnFd fd = make_fd("x");
  CHECK(ask(raw.get(), request) == ErrorCode::kInvalidArgument);
  CHECK(ask(raw.get(), request, {fd.get(), fd.get()}) == ErrorCode::kInvalidArgument);
  CHECK(ask(raw.get(), request, std::vector<int>(64, fd.get())) == ErrorCode::kInvalidArgument);
  CHECK(keeper.connect().list()->empty());
}

TEST_CASE("clients that ask and never read are dropped, and the owner is served meanwhile") {
  const KeeperProcess keeper;
  KeeperClient client = keeper.connect();
  REQUIRE(client.put(kSegment1, make_fd("kept").get(), {}).ok());
  const Child flood([&] {
    while (true) {  // until it is killed: ask until the keeper has had enough, and again
      auto raw = protocol::connect_before(keeper.socket(), later());
      KeeperRequest request;
      request.op = KeeperOp::kList;
      while (raw.ok() && !is_closed(*raw)) (void)protocol::send(raw->get(), bytes_of(request));
    }
  });
  for (int i = 0; i < 300; ++i) {
    REQUIRE(client.put(kSegment1, make_fd(std::to_string(i)).get(), {}).ok());
    REQUIRE(client.list()->size() == 1);
  }
  const OwnFd raw = keeper.connect_raw();
  KeeperRequest request;
  request.op = KeeperOp::kList;
  CHECK(eventually([&] {
    (void)protocol::send(raw.get(), bytes_of(request));
    return is_closed(raw);
  }));
}

TEST_CASE("a thousand idle connections keep neither the owner nor the next larderd out") {
  const KeeperProcess keeper;
  KeeperClient client = keeper.connect();
  REQUIRE(client.put(kSegment1, make_fd("kept").get(), {}).ok());
  std::vector<OwnFd> idle;
  for (int i = 0; i < 1000; ++i) idle.push_back(keeper.connect_raw());
  CHECK(client.list()->size() == 1);
  CHECK(eventually([&] {
    return std::ranges::count_if(idle, [](const OwnFd& raw) { return !is_closed(raw); }) == 15;
  }));
  CHECK(!is_closed(idle.back()));
  KeeperClient next = keeper.connect();  // the same process, so it is admitted
  CHECK(next.list()->size() == 1);
  CHECK(client.list().status().code() == ErrorCode::kPermissionDenied);
}

TEST_CASE("at its limit of descriptors the keeper refuses, keeps all it has, and still replaces") {
  const KeeperProcess keeper(256);
  KeeperClient client = keeper.connect();
  uint64_t count = 0;
  Status status;
  while (true) {
    const OwnFd fd = make_fd(std::to_string(count));
    status = client.put(keeper_key(KeeperKind::kSegment, count), fd.get(), {});
    if (!status.ok()) break;
    ++count;
  }
  CHECK(status.code() == ErrorCode::kResourceExhausted);
  INFO(status.message());
  CHECK(status.message().find("kind 2, id 128") != std::string::npos);
  CHECK(status.message().find("holds 128 entries") != std::string::npos);
  CHECK(count == 128);
  REQUIRE(client.put(kSegment1, make_fd("new").get(), {}).ok());
  KeeperClient again = keeper.connect();
  const auto entries = again.list();
  REQUIRE(entries.ok());
  REQUIRE(entries->size() == count);
  for (uint64_t id = 0; id < count; ++id)
    CHECK(content_of((*entries)[id].fd) == (id == 1 ? "new" : std::to_string(id)));
  CHECK(again.drop(kSegment1).ok());
  CHECK(again.put(keeper_key(KeeperKind::kJournal, 0), make_fd("journal").get(), {}).ok());
}

TEST_CASE("a limit of descriptors that leaves no room is refused at start") {
  const test::TemporaryFolder folder;
  const test::Output output =
      test::run({"/bin/sh", "-c", "ulimit -n 100 && exec \"$0\" \"$@\"",
                 std::string(LARDER_BIN_DIR) + "/larder-keeper", "--socket", folder.file("s")});
  CHECK(output.exit_code == 1);
  CHECK(output.stderr_text.find("RLIMIT_NOFILE is 100; more than 128") != std::string::npos);
}

TEST_CASE("a larderd is admitted only when the last one's process is dead") {
  struct State {
    std::atomic<int> step{0};
    std::atomic<int> late_code{-1};
  };
  const KeeperProcess keeper;
  const Shared<State> state;
  const OwnFd content = make_fd("from the first");
  const OwnFd late = make_fd("too late");
  std::optional<Child> first(std::in_place, [&] {
    auto raw = protocol::connect_before(keeper.socket(), later());
    KeeperRequest request;
    (void)ask(raw->get(), request);
    request.epoch = 1;
    request.op = KeeperOp::kPut;
    request.key = kSegment1;
    (void)ask(raw->get(), request, {content.get()});
    if (::fork() == 0) {  // holds the connection when its parent is dead
      ::alarm(60);
      while (state->step < 3) ::sched_yield();
      state->late_code = static_cast<int>(ask(raw->get(), request, {late.get()}).value());
      ::_exit(0);
    }
    raw->reset();
    state->step = 1;
    ::pause();
  });
  REQUIRE(eventually([&] { return state->step == 1; }));
  auto refused = KeeperClient::connect(keeper.socket());
  REQUIRE(!refused.ok());
  CHECK(refused.status().code() == ErrorCode::kBusy);
  CHECK(refused.status().message().find("another larderd, whose process lives") !=
        std::string::npos);
  first->kill();  // and nobody has waited for it yet
  KeeperClient client = keeper.connect();
  CHECK(content_of(client.list()->at(0).fd) == "from the first");
  state->step = 3;
  REQUIRE(eventually([&] { return state->late_code >= 0; }));
  CHECK(state->late_code == static_cast<int>(ErrorCode::kPermissionDenied));
  CHECK(content_of(client.list()->at(0).fd) == "from the first");
}

TEST_CASE("an owner that closed its connection and lives is still the owner") {
  const KeeperProcess keeper;
  const Shared<std::atomic<bool>> closed;
  const Child first([&] {
    { auto client = KeeperClient::connect(keeper.socket()); }
    closed->store(true);
    ::pause();
  });
  REQUIRE(eventually([&] { return closed->load(); }));
  CHECK(KeeperClient::connect(keeper.socket()).status().code() == ErrorCode::kBusy);
  first.kill();
  CHECK(KeeperClient::connect(keeper.socket()).ok());
}

TEST_CASE("SIGTERM ends the keeper with 0 and what only it held is gone; SIGPIPE does not end it") {
  KeeperProcess keeper;
  KeeperClient client = keeper.connect();
  std::array<int, 2> ends{};
  REQUIRE(::pipe2(ends.data(), O_CLOEXEC) == 0);
  const OwnFd reader(ends[0]);
  OwnFd writer(ends[1]);
  REQUIRE(client.put(kSegment1, writer.get(), {}).ok());
  writer.reset();
  keeper.process().signal(SIGPIPE);
  CHECK(client.list()->size() == 1);
  keeper.process().signal(SIGTERM);
  CHECK(keeper.process().wait_exit(20s) == 0);
  CHECK(::access(keeper.socket().c_str(), F_OK) != 0);
  pollfd entry{reader.get(), POLLIN, 0};
  CHECK(::poll(&entry, 1, 0) == 1);
  const auto gone = client.list();
  CHECK(gone.status().code() == ErrorCode::kUnavailable);
  CHECK(!client.connected());
}

TEST_CASE("a keeper that does not answer is given up at the deadline, with the reason") {
  KeeperProcess keeper;
  KeeperClient client = keeper.connect();
  keeper.process().signal(SIGSTOP);
  const Status status = client.put(kSegment1, make_fd("x").get(), {});
  CHECK(status.code() == ErrorCode::kUnavailable);
  CHECK(status.message().find("did not answer in time") != std::string::npos);
  CHECK(!client.connected());
  CHECK(client.put(kSegment1, -1, {}).code() == ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace larder::daemon
