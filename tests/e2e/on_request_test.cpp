// Append and attend through the executor: same bytes and results as in process, hostile records,
// ownership, and the executor's death.
#include <cmath>
#include <cstring>
#include <limits>
#include <signal.h>
#include <vector>

#include <doctest/doctest.h>

#include "client/control_connection.h"
#include "client/request_ring.h"
#include "tests/support/node.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr int64_t kDim = 64;

TensorView rows(std::vector<float>& values, int64_t heads = 1) {
  return dense_tensor(values.data(), Dtype::kFp32,
                      static_cast<int64_t>(values.size()) / (heads * kDim), heads, kDim);
}

std::vector<std::byte> pool_bytes(Pool& pool, const BlockHandle& block, int64_t size) {
  const std::byte* data = pool.data().value() + block.id * pool.block_stride_bytes();
  return {data, data + size};
}

TEST_CASE("both executions write the same bytes and give the same attention, bit for bit") {
  Node node;
  Client client = node.connect();
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kBf16}) {
    std::vector<float> k = random_values(37 * kDim, 1);
    std::vector<float> v = random_values(37 * kDim, 2);
    std::vector<float> q = random_values(5 * 4 * kDim, 3);
    std::vector<float> out[2];
    std::vector<float> lse[2];
    std::vector<std::byte> bytes[2];
    for (int i = 0; i < 2; ++i) {
      const Execution execution = i == 0 ? Execution::kInProcess : Execution::kOnRequest;
      auto pool = client.open_pool(
          small_pool("p" + std::to_string(i) + std::string(name(format)), execution, format));
      REQUIRE(pool.ok());
      Sequence sequence = pool->begin_sequence();
      REQUIRE(sequence.extend(37).ok());
      for (int layer = 0; layer < 2; ++layer)
        REQUIRE(sequence.append(layer, rows(k), rows(v)).ok());
      out[i].assign(q.size(), std::numeric_limits<float>::quiet_NaN());
      lse[i].assign(5 * 4, std::numeric_limits<float>::quiet_NaN());
      REQUIRE(sequence.attend(1, rows(q, 4), rows(out[i], 4), lse[i].data()).ok());
      for (const BlockHandle& block : sequence.blocks()) {
        const auto part = pool_bytes(*pool, block, pool->block_stride_bytes());
        bytes[i].insert(bytes[i].end(), part.begin(), part.end());
      }
    }
    CHECK(bytes[0] == bytes[1]);
    CHECK(out[0] == out[1]);
    CHECK(lse[0] == lse[1]);
    CHECK(std::isfinite(out[0][0]));
  }
}

TEST_CASE("an append larger than the arena goes in portions") {
  Node node;
  Client client = node.connect({.arena_bytes = 1 << 20});
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16, 1024));
  REQUIRE(pool.ok());
  Sequence sequence = pool->begin_sequence();
  REQUIRE(sequence.extend(8000).ok());
  std::vector<float> v(8000 * kDim);
  for (size_t i = 0; i < v.size(); ++i) v[i] = i < v.size() / 2 ? 1.0f : 3.0f;
  std::vector<float> q(kDim, 0.0f);
  std::vector<float> out(kDim);
  REQUIRE(sequence.append(0, rows(v), rows(v)).ok());
  REQUIRE(sequence.attend(0, rows(q), rows(out)).ok());
  CHECK(out[0] == doctest::Approx(2.0));  // q = 0: the mean of V
  // An attention that does not fit says what is needed.
  std::vector<float> many_q(8000 * kDim);
  std::vector<float> many_out(8000 * kDim);
  const Status refused = sequence.attend(0, rows(many_q), rows(many_out));
  CHECK(refused.code() == ErrorCode::kResourceExhausted);
  CHECK(refused.message().find("arena_bytes") != std::string::npos);
  REQUIRE(sequence.attend(0, rows(q), rows(out)).ok());
}

TEST_CASE("a copied block attends like its original") {
  Node node;
  Client client = node.connect();
  for (const KvLayout layout : {KvLayout::kBlhnc, KvLayout::kLbhnc}) {
    PoolOptions options =
        small_pool(std::string("copy") + std::string(name(layout)), Execution::kOnRequest);
    options.layout = layout;
    auto pool = client.open_pool(options);
    REQUIRE(pool.ok());
    auto blocks = pool->allocate(2);
    REQUIRE(blocks.ok());
    std::vector<float> kv = random_values(16 * kDim, 4);
    std::vector<int64_t> slots;
    for (int i = 0; i < 16; ++i) slots.push_back((*blocks)[0].id * 16 + i);
    for (int layer = 0; layer < 2; ++layer)
      REQUIRE(pool->append(layer, rows(kv), rows(kv), slots).ok());
    REQUIRE(pool->copy(std::span(*blocks).first(1), std::span(*blocks).last(1)).ok());
    std::vector<float> q = random_values(kDim, 5);
    std::vector<float> out[2] = {std::vector<float>(kDim), std::vector<float>(kDim)};
    for (size_t i = 0; i < 2; ++i) {
      const int32_t one = 1;
      const int32_t length = 16;
      AttendBatch batch;
      batch.q = rows(q);
      batch.out = rows(out[i]);
      batch.q_lens = std::span(&one, 1);
      batch.seq_lens = std::span(&length, 1);
      batch.block_table = std::span(&(*blocks)[i].id, 1);
      batch.block_table_stride = 1;
      REQUIRE(pool->attend(1, batch).ok());
    }
    CHECK(out[0] == out[1]);
  }
}

TEST_CASE("a session can neither write nor read another session's open block") {
  Node node;
  Client owner = node.connect();
  Client other = node.connect();
  auto mine = owner.open_pool(small_pool("p", Execution::kOnRequest));
  auto theirs = other.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(mine.ok());
  REQUIRE(theirs.ok());
  auto blocks = mine->allocate(1);
  REQUIRE(blocks.ok());
  const auto before = pool_bytes(*mine, (*blocks)[0], mine->block_stride_bytes());
  std::vector<float> kv(kDim, 1.0f);
  const int64_t slot = (*blocks)[0].id * 16;
  const Status write = theirs->append(0, rows(kv), rows(kv), std::span(&slot, 1));
  CHECK(write.code() == ErrorCode::kPermissionDenied);
  CHECK(write.message().find("block " + std::to_string((*blocks)[0].id)) != std::string::npos);
  CHECK(pool_bytes(*mine, (*blocks)[0], mine->block_stride_bytes()) == before);
  std::vector<float> out(kDim);
  const int32_t one = 1;
  AttendBatch batch;
  batch.q = rows(kv);
  batch.out = rows(out);
  batch.q_lens = batch.seq_lens = std::span(&one, 1);
  batch.block_table = std::span(&(*blocks)[0].id, 1);
  batch.block_table_stride = 1;
  CHECK(theirs->attend(0, batch).code() == ErrorCode::kPermissionDenied);
  CHECK(mine->append(0, rows(kv), rows(kv), std::span(&slot, 1)).ok());
  CHECK(mine->attend(0, batch).ok());
  // Released, the block is nobody's.
  REQUIRE(mine->release(*blocks).ok());
  CHECK(mine->append(0, rows(kv), rows(kv), std::span(&slot, 1)).code() ==
        ErrorCode::kPermissionDenied);
}

TEST_CASE("slots and shapes that do not fit the pool are refused in both executions") {
  Node node;
  Client client = node.connect();
  for (const Execution execution : {Execution::kInProcess, Execution::kOnRequest}) {
    auto pool = client.open_pool(small_pool("p", execution));
    REQUIRE(pool.ok());
    auto blocks = pool->allocate(8);
    REQUIRE(blocks.ok());
    std::vector<float> kv(2 * kDim, 1.0f);
    const auto append = [&](const TensorView& k, std::vector<int64_t> slots, int layer = 0) {
      return pool->append(layer, k, rows(kv), slots).code();
    };
    CHECK(append(rows(kv), {0, 128}) == ErrorCode::kInvalidArgument);  // 8 blocks of 16
    CHECK(append(rows(kv), {0, 1, 2}) == ErrorCode::kInvalidArgument);
    CHECK(append(rows(kv), {0, 1}, 2) == ErrorCode::kInvalidArgument);
    CHECK(append(rows(kv, 2), {0}) == ErrorCode::kInvalidArgument);
    CHECK(append(rows(kv), {-1, -1}) == ErrorCode::kOk);
    CHECK(append(rows(kv), {0}) == ErrorCode::kOk);
    CHECK(pool->release(*blocks).ok());
  }
}

TEST_CASE("calls survive the death of the executor") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16, 64));
  REQUIRE(pool.ok());
  Sequence sequence = pool->begin_sequence();
  std::vector<float> kv(kDim);
  std::vector<float> q(kDim, 0.0f);
  std::vector<float> out(kDim);
  double sum = 0.0;
  for (int token = 0; token < 60; ++token) {
    REQUIRE(sequence.extend(1).ok());
    std::fill(kv.begin(), kv.end(), static_cast<float>(token));
    if (token % 20 == 10) {
      const auto pid = node.ctl({"status"})["executor_pid"].get<pid_t>();
      if (pid > 0) ::kill(pid, SIGKILL);
    }
    REQUIRE(sequence.append(0, rows(kv), rows(kv)).to_string() == "OK");
    REQUIRE(sequence.attend(0, rows(q), rows(out)).to_string() == "OK");
    sum += token;
    CHECK(out[0] == doctest::Approx(sum / (token + 1)));
  }
  CHECK(node.ctl({"status"})["executor_restarts"].get<int>() >= 2);
  node.await_ready();
}

TEST_CASE("an attention past the limit of one call is refused with the products") {
  Node node;
  Client client = node.connect({.arena_bytes = 64 << 20});
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16, 4096));
  REQUIRE(pool.ok());
  Sequence sequence = pool->begin_sequence();
  REQUIRE(sequence.extend(60000).ok());
  // 20000 rows * (40001 .. 60000) keys at most * 1 head * 128: 1.5e11, more than 2^36 = 6.9e10.
  std::vector<float> q(20000 * kDim);
  std::vector<float> out(20000 * kDim);
  const Status refused = sequence.attend(0, rows(q), rows(out));
  CHECK(refused.code() == ErrorCode::kInvalidArgument);
  CHECK(refused.message().find("68719476736") != std::string::npos);
  std::vector<float> one(kDim);
  CHECK(sequence.attend(0, rows(one), rows(one)).ok());
}

}  // namespace
}  // namespace larder::test
