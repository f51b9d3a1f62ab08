// Clients that go in the middle of a call or of a connection, and what is left of them.
#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <limits>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include "protocol/channel.h"
#include "protocol/limits.h"
#include "tests/support/node.h"
#include "tests/support/raw_session.h"

namespace larder::test {
namespace {

constexpr int64_t kDim = 64;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

auto deadline() { return std::chrono::steady_clock::now() + std::chrono::seconds(10); }

// A client's process with an open block that it has filled and another that it has not, and a call
// that it will queue.
class Victim {
 public:
  Victim(const Node& node, protocol::Op op) {
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends_) == 0);
    pid_ = ::fork();
    if (pid_ == 0) live(node, op, ends_[1]);
    ::close(ends_[1]);  // so that a victim that dies early ends a read
    await_word();
  }
  ~Victim() {
    if (pid_ > 0) end();
    ::close(ends_[0]);
  }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;

  void queue() {
    REQUIRE(::write(ends_[0], "x", 1) == 1);
    await_word();
  }
  void end() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  void await_word() {
    char byte = 0;
    REQUIRE(::read(ends_[0], &byte, 1) == 1);
  }

  // noexcept: what goes wrong must not unwind into the parent's test.
  [[noreturn]] static void live(const Node& node, protocol::Op op, int parent) noexcept {
    RawSession raw(node);
    const auto pool =
        raw.control.call_for<protocol::PoolOpened>(protocol::OpenPool{raw_pool("nvfp4", 2, 16)})
            .value();
    const auto blocks =
        raw.control.call_for<protocol::Blocks>(protocol::Allocate{pool.pool, 0, 2}).value();
    const auto to_block = [&](size_t block) {
      if (!raw.ring.start(deadline()).ok()) ::_exit(3);
      return append_record(raw.ring, pool.pool, blocks.blocks[block].id);
    };
    if (!raw.ring.run(to_block(0), deadline()).ok()) ::_exit(4);
    const protocol::Submission record =
        op == protocol::Op::kAppend ? to_block(1)
                                    : attend_record(raw.ring, pool.pool, blocks.blocks[0].id);
    char byte = 'x';
    if (::write(parent, &byte, 1) != 1 || ::read(parent, &byte, 1) != 1) ::_exit(5);
    const Status status = raw.ring.run(record, std::chrono::steady_clock::now());
    if (status.code() != ErrorCode::kDeadlineExceeded) ::_exit(6);  // it stays queued
    if (::write(parent, &byte, 1) != 1) ::_exit(7);
    while (true) ::pause();
  }

  // 16 rows of 100, which would be seen in anybody else's attention.
  static protocol::Submission append_record(RequestRing& ring, uint64_t pool, int64_t block) {
    const std::vector<float> rows(16 * kDim, 100.0f);
    std::array<int64_t, 16> slots;
    for (int64_t i = 0; i < 16; ++i) slots[static_cast<size_t>(i)] = block * 16 + i;
    protocol::Submission record;
    record.op = static_cast<uint32_t>(protocol::Op::kAppend);
    record.pool = pool;
    record.first.dtype = static_cast<uint32_t>(Dtype::kFp32);
    record.first.offset_bytes = ring.stage(rows.data(), rows.size()).value().offset_bytes;
    record.first.shape = {16, 1, kDim};
    record.first.strides = {kDim, kDim, 1};
    record.second = record.first;
    record.slots = ring.stage(slots.data(), slots.size()).value();
    return record;
  }

  static protocol::Submission attend_record(RequestRing& ring, uint64_t pool, int32_t block) {
    const std::vector<float> q(kDim, 1.0f);
    const int32_t q_len = 1;
    const int32_t seq_len = 16;
    protocol::Submission record;
    record.op = static_cast<uint32_t>(protocol::Op::kAttend);
    record.pool = pool;
    record.first.dtype = record.second.dtype = static_cast<uint32_t>(Dtype::kFp32);
    record.first.offset_bytes = ring.stage(q.data(), q.size()).value().offset_bytes;
    record.second.offset_bytes = ring.reserve(q.size() * sizeof(float)).value().offset_bytes;
    record.first.shape = record.second.shape = {1, 1, kDim};
    record.first.strides = record.second.strides = {kDim, kDim, 1};
    record.q_lens = ring.stage(&q_len, 1).value();
    record.seq_lens = ring.stage(&seq_len, 1).value();
    record.block_table = ring.stage(&block, 1).value();
    record.block_table_stride = 1;
    record.scale = 0.125f;
    return record;
  }

  int ends_[2];
  pid_t pid_ = 0;
};

// Stopped while it lives. A signal is under way for a moment: the constructor waits that out.
class Stopped {
 public:
  explicit Stopped(pid_t pid) : pid_(pid) {
    ::kill(pid_, SIGSTOP);
    const std::string path = "/proc/" + std::to_string(pid_) + "/stat";
    REQUIRE(eventually([&] { return read_file(path).find(") T ") != std::string::npos; }));
  }
  ~Stopped() { ::kill(pid_, SIGCONT); }
  Stopped(const Stopped&) = delete;
  Stopped& operator=(const Stopped&) = delete;

 private:
  pid_t pid_;
};

// Bits of out and lse of the last five tokens.
std::vector<uint32_t> attention_of(Sequence& sequence) {
  std::vector<float> q(5 * kDim);
  for (size_t i = 0; i < q.size(); ++i) q[i] = 0.01f * static_cast<float>(i);
  std::vector<float> result(5 * kDim + 5, kNan);
  const Status status = sequence.attend(1, dense_tensor(q.data(), Dtype::kFp32, 5, 1, kDim),
                                        dense_tensor(result.data(), Dtype::kFp32, 5, 1, kDim),
                                        result.data() + 5 * kDim);
  REQUIRE_MESSAGE(status.ok(), status.to_string());
  CHECK(std::none_of(result.begin(), result.end(), [](float value) { return value != value; }));
  std::vector<uint32_t> bits;
  for (const float value : result) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

int64_t free_blocks(Pool& pool) { return pool.stats().value().at(0).free; }

TEST_CASE("blocks of a client killed with a call queued are free once the executor has let go") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  Sequence sequence = pool->begin_sequence();
  REQUIRE(sequence.extend(40).ok());
  std::vector<float> rows(40 * kDim);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 37) - 18.0f;
  const TensorView view = dense_tensor(rows.data(), Dtype::kFp32, 40, 1, kDim);
  REQUIRE(sequence.append(1, view, view).ok());
  const std::vector<uint32_t> before = attention_of(sequence);
  const auto executor = node.ctl({"status"})["executor_pid"].get<pid_t>();
  REQUIRE(free_blocks(*pool) == 5);
  {
    Victim appending(node, protocol::Op::kAppend);
    Victim attending(node, protocol::Op::kAttend);
    CHECK(free_blocks(*pool) == 1);
    const Stopped stopped(executor);
    for (Victim* victim : {&appending, &attending}) {
      victim->queue();
      victim->end();
    }
    CHECK(eventually([&] {
      const auto sessions = node.ctl({"sessions"});
      return std::count_if(sessions.begin(), sessions.end(),
                           [](const auto& session) { return session["closing"] == true; }) == 2;
    }));
    // The queued append may still run: nobody else may have its block.
    CHECK(free_blocks(*pool) == 1);
  }
  CHECK(eventually([&] { return free_blocks(*pool) == 5; }));
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 2; }));  // and larderctl's
  auto rest = pool->allocate(5);
  REQUIRE(rest.ok());
  CHECK(attention_of(sequence) == before);
  const auto status = node.ctl({"status"});
  CHECK(status["executor_pid"] == executor);
  CHECK(status["executor_restarts"] == 0);
}

auto count_fds(pid_t pid) {
  return std::distance(std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd"),
                       std::filesystem::directory_iterator());
}

TEST_CASE("connections that close or half-close at once leave nothing and disturb nobody") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  protocol::Connect hello;
  hello.min_version = hello.max_version = protocol::kMaxVersion;
  hello.tenant = "default";
  hello.role = "append";
  hello.arena_bytes = protocol::kMinArenaBytes;
  const protocol::Bytes greeting = protocol::encode(protocol::Request{1, 0, hello});
  const auto of_daemon = count_fds(node.larderd().pid());
  std::vector<OwnFd> half_closed;
  for (int round = 0; round < 200; ++round) {
    OwnFd socket = protocol::connect_before(node.socket(), deadline()).value();
    const bool says_hello = round % 4 >= 2;
    if (says_hello) REQUIRE(protocol::send_before(socket.get(), greeting, {}, deadline()).ok());
    if (round % 2 == 0) {
      REQUIRE(::shutdown(socket.get(), SHUT_WR) == 0);
      // What was asked before is answered, then larderd closes its half.
      if (says_hello) {
        auto received = protocol::receive_before(socket.get(), deadline());
        REQUIRE_MESSAGE(received.ok(), received.status().to_string());
        const auto reply = protocol::decode_reply(received->bytes);
        REQUIRE(reply.ok());
        CHECK(std::holds_alternative<protocol::Connected>(reply->body));
      }
      const auto end = protocol::receive_before(socket.get(), deadline());
      REQUIRE(!end.ok());
      CHECK(end.status().code() == ErrorCode::kUnavailable);
      half_closed.push_back(std::move(socket));
    }
    REQUIRE(pool->stats().ok());
  }
  // With the client's halves still open.
  CHECK(half_closed.size() == 100);
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 2; }));  // ours and larderctl's
  CHECK(eventually([&] { return count_fds(node.larderd().pid()) == of_daemon; }));
  CHECK(node.ctl({"status"})["executor_restarts"] == 0);
  Sequence sequence = pool->begin_sequence();
  REQUIRE(sequence.extend(16).ok());
  std::vector<float> rows(16 * kDim, 1.0f);
  const TensorView view = dense_tensor(rows.data(), Dtype::kFp32, 16, 1, kDim);
  CHECK(sequence.append(0, view, view).ok());
}

}  // namespace
}  // namespace larder::test
