// Rings and records that do not follow the rules, and what the executor makes of them.
#include <chrono>
#include <limits>
#include <signal.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/raw_session.h"

namespace larder::test {
namespace {

constexpr int64_t kDim = 64;

TEST_CASE("hostile records are refused by field, and the ring goes on") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  RawSession raw(node);
  protocol::Submission good;
  good.op = static_cast<uint32_t>(protocol::Op::kAppend);
  good.pool = node.ctl({"pools"})[0]["pool"];
  CHECK(raw.run(good).code() == ErrorCode::kNotFound);  // not open in this session
  REQUIRE(raw.control.call(protocol::OpenPool{raw_pool("nvfp4", 2, 16)}).ok());
  good.first.dtype = good.second.dtype = static_cast<uint32_t>(Dtype::kFp32);
  good.first.offset_bytes = good.second.offset_bytes = protocol::kArenaDataOffset;
  good.first.shape = good.second.shape = {1, 1, kDim};
  good.first.strides = good.second.strides = {kDim, kDim, 1};
  good.slots = {protocol::kArenaDataOffset, 0};
  REQUIRE(raw.run(good).to_string() == "OK");
  const auto refused = [&](auto change, const char* word) {
    protocol::Submission bad = good;
    change(bad);
    const Status status = raw.run(bad);
    INFO(word, ": ", status.to_string());
    CHECK(!status.ok());
    CHECK(status.message().find(word) != std::string::npos);
  };
  using S = protocol::Submission;
  constexpr auto kHuge = std::numeric_limits<int64_t>::max();
  refused([](S& s) { s.op = 77; }, "op is 77");
  refused([](S& s) { s.layer = 2; }, "layer is 2");
  refused([](S& s) { s.group = 1; }, "group is 1");
  refused([](S& s) { s.flags = 0x80; }, "flags");
  refused([](S& s) { s.reserved[7] = 1; }, "reserved");
  refused([](S& s) { s.wait_word = 64; }, "wait_word is 64");
  refused([](S& s) { s.signal_word = 64; }, "signal_word is 64");
  refused([](S& s) { s.first.memory = 1; }, "k.memory is 1");
  refused([](S& s) { s.first.dtype = 9; }, "k.dtype is 9");
  refused([](S& s) { s.first.shape = {-1, 1, kDim}; }, "k");
  refused([](S& s) { s.first.shape = {kHuge, kHuge, kDim}; }, "k");
  refused(
      [](S& s) {
        s.first.shape[0] = 2;
        s.first.strides[0] = kHuge;
      },
      "k");
  refused(
      [](S& s) {
        s.first.shape[0] = 2;
        s.first.strides[0] = -1000000;
      },
      "k");
  refused([](S& s) { s.first.offset_bytes = 0; }, "k");  // the header
  refused([](S& s) { s.first.offset_bytes = protocol::kMinArenaBytes - 4; }, "k");
  refused([](S& s) { s.first.offset_bytes = ~uint64_t{0} - 3; }, "k");
  refused([](S& s) { s.first.offset_bytes += 2; }, "k");  // misaligned
  refused([](S& s) { s.slots = {protocol::kMinArenaBytes, 1}; }, "slots");
  refused([](S& s) { s.slots.count = ~uint64_t{0}; }, "slots");
  refused(
      [](S& s) {
        s.op = 2;
        s.q_lens = {protocol::kArenaDataOffset, 1};
      },
      "seq_lens");
  refused(
      [](S& s) {
        s.op = 2;
        s.lse = {protocol::kArenaDataOffset, 5};
      },
      "lse has 5");
  refused(
      [](S& s) {
        s.op = 2;
        s.block_table = {protocol::kArenaDataOffset, 1};
      },
      "block_table 1");
  refused(
      [](S& s) {
        s.op = 2;
        s.block_table_stride = ~uint64_t{0};
      },
      "stride");
  refused(
      [](S& s) {
        s.op = 2;
        s.shard = {0, 0, 16};
      },
      "shard.num_ranks is 0 with shard.rank 0 and shard.interleave 16");
  refused(
      [](S& s) {
        s.op = 2;
        s.scale = s.out_scale = s.out_sf_scale = 1.0f;
        s.shard = {2, -1, 16};
      },
      "shard.rank is -1");
  refused(
      [](S& s) {
        s.op = 2;
        s.scale = s.out_scale = s.out_sf_scale = 1.0f;
        s.shared_prefix_tokens = -2;
      },
      "shared_prefix_tokens is -2");
  // Work without end: rows on top of each other, and keys that repeat.
  const auto big_attend = [](S& s) {
    s.op = 2;
    s.q_lens = s.seq_lens = s.block_table = {protocol::kArenaDataOffset, 0};
    s.q_lens.count = s.seq_lens.count = s.block_table.count = 1;
    s.first.shape = s.second.shape = {1 << 21, 1, kDim};
    s.first.strides = {0, 0, 0};
    s.second.strides = {1, 1, 1};
  };
  refused(big_attend, "");
  refused(
      [&](S& s) {
        big_attend(s);
        s.second.strides = {kDim, kDim, 1};
      },
      "");
  CHECK(raw.run(good).ok());
  CHECK(node.ctl({"status"})["executor_restarts"] == 0);
}

TEST_CASE("a block is not published before what was queued for it has run") {
  Node node;
  RawSession raw(node);
  const auto pool =
      raw.control.call_for<protocol::PoolOpened>(protocol::OpenPool{raw_pool("bf16", 1, 1)})
          .value();
  const auto blocks =
      raw.control.call_for<protocol::Blocks>(protocol::Allocate{pool.pool, 0, 1}).value();
  const auto executor = node.ctl({"status"})["executor_pid"].get<pid_t>();
  ::kill(executor, SIGSTOP);
  const auto now = std::chrono::steady_clock::now();
  REQUIRE(raw.ring.start(now + std::chrono::seconds(10)).ok());
  const std::vector<float> ones(kDim, 1.0f);
  const int64_t slot = blocks.blocks[0].id;
  protocol::Submission append;
  append.op = static_cast<uint32_t>(protocol::Op::kAppend);
  append.pool = pool.pool;
  append.first.dtype = static_cast<uint32_t>(Dtype::kFp32);
  append.first.offset_bytes = raw.ring.stage(ones.data(), ones.size()).value().offset_bytes;
  append.first.shape = {1, 1, kDim};
  append.first.strides = {kDim, kDim, 1};
  append.second = append.first;
  append.slots = raw.ring.stage(&slot, 1).value();
  CHECK(raw.ring.run(append, now).code() == ErrorCode::kDeadlineExceeded);  // it stays queued
  // larderd may notice the death before or after it gets the publication: it has to wait either
  // way.
  ::kill(executor, SIGKILL);
  const auto published = raw.control.call(
      protocol::Publish{pool.pool, "", std::vector<int32_t>{5}, blocks.blocks, {}, 0});
  CHECK(published.status().to_string() == "OK");
  REQUIRE(raw.ring.start(std::chrono::steady_clock::now() + std::chrono::seconds(10)).ok());
  Client reader = node.connect();
  PoolOptions same = small_pool("p", Execution::kInProcess, KvFormat::kBf16);
  same.geometry.num_layers = same.geometry.block_tokens = 1;
  auto mapped = reader.open_pool(same);
  REQUIRE_MESSAGE(mapped.ok(), mapped.status().to_string());
  const std::byte* first =
      mapped->data().value() + blocks.blocks[0].id * mapped->block_stride_bytes();
  CHECK(first[0] == std::byte{0x80});  // bf16 1.0 is 0x3f80
  CHECK(first[1] == std::byte{0x3f});
}

TEST_CASE("a call that overtakes the executor's knowledge of its pool waits for it") {
  Node node;
  const auto executor = node.ctl({"status"})["executor_pid"].get<pid_t>();
  RawSession raw(node);
  ::kill(executor, SIGSTOP);
  protocol::Submission append;
  append.op = static_cast<uint32_t>(protocol::Op::kAppend);
  // More pools than messages that the executor reads at one go.
  for (int i = 0; i < 20; ++i) {
    protocol::PoolSpec spec = raw_pool("nvfp4", 1, 16);
    spec.name += std::to_string(i);
    append.pool = raw.control.call_for<protocol::PoolOpened>(protocol::OpenPool{spec}).value().pool;
  }
  append.first.dtype = static_cast<uint32_t>(Dtype::kFp32);
  append.first.offset_bytes = protocol::kArenaDataOffset;
  append.first.shape = {0, 1, kDim};
  append.first.strides = {kDim, kDim, 1};
  append.second = append.first;
  Status status(ErrorCode::kInternal, "not answered");
  std::thread caller([&] { status = raw.run(append); });
  CHECK(eventually([&] { return raw.header().submit_tail.load() != 0; }));
  ::kill(executor, SIGCONT);
  caller.join();
  CHECK(status.to_string() == "OK");
}

TEST_CASE("a session whose ring indices make no sense is ended, others are not") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  {
    protocol::Connect hello;
    hello.tenant = "default";
    hello.role = "append";
    hello.arena_bytes = protocol::kMinArenaBytes;
    auto control =
        ControlConnection::connect(node.socket(), hello, std::chrono::seconds(10)).value();
    const std::vector<OwnFd> fds = control.take_fds();
    const SharedMapping mapping =
        SharedMapping::map(fds[0].get(), static_cast<int64_t>(protocol::kMinArenaBytes), true);
    auto* header = reinterpret_cast<protocol::ArenaHeader*>(mapping.data());
    header->submit_tail = 0x80000000u;
    const uint64_t one = 1;
    REQUIRE(::write(fds[1].get(), &one, sizeof one) == sizeof one);
    CHECK(eventually([&] { return !control.call(protocol::GetStatus{}).ok(); }));
  }
  CHECK(pool->allocate(1).ok());
  std::vector<float> kv(kDim, 1.0f);
  const int64_t skip = -1;
  const TensorView row = dense_tensor(kv.data(), Dtype::kFp32, 1, 1, kDim);
  CHECK(pool->append(0, row, row, std::span(&skip, 1)).ok());
}

}  // namespace
}  // namespace larder::test
