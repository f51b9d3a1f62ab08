// The C API on a node beside the C++ API: the same bytes, values and refusals.
#include <algorithm>
#include <cmath>
#include <limits>
#include <signal.h>
#include <vector>

#include <doctest/doctest.h>

#include "tests/e2e/c_handles.h"

namespace larder::test {
namespace {

TensorView view(const larder_tensor& tensor) {
  return dense_tensor(tensor.data, Dtype::kFp32, tensor.shape[0], tensor.shape[1], tensor.shape[2]);
}

TEST_CASE("C and C++ write the same bytes and give the same attention, in both executions") {
  Node node;
  Client client = node.connect();
  const CClient c_client = connect(node);
  std::vector<float> k = random_values(37 * kDim, 1);
  std::vector<float> v = random_values(37 * kDim, 2);
  std::vector<float> q = random_values(5 * 4 * kDim, 3);
  for (const Execution execution : {Execution::kInProcess, Execution::kOnRequest}) {
    auto pool = client.open_pool(small_pool("cpp", execution));
    REQUIRE(pool.ok());
    Sequence sequence = pool->begin_sequence();
    REQUIRE(sequence.extend(37).ok());
    for (int layer = 0; layer < 2; ++layer)
      REQUIRE(sequence.append(layer, view(rows(k)), view(rows(v))).ok());
    const CPool c_pool =
        open_pool(c_client, c_small_pool("c", static_cast<larder_execution>(execution)));
    const CSequence c_sequence = begin(c_pool);
    append_all(c_sequence, k, v);

    for (int32_t layer = 0; layer < 2; ++layer) {
      std::vector<std::byte> bytes(3 * static_cast<size_t>(pool->page_bytes()));
      REQUIRE(pool->read_pages(layer, sequence.block_ids(), bytes).ok());
      CHECK(layer_bytes(c_pool, layer, block_ids(c_sequence)) == bytes);
    }
    const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f};
    AttendOptions options;
    options.scale = 0.25f;
    options.window_left = 9;
    options.sinks = sinks;
    options.lse_form = {true, true, true};
    larder_attend_options c_options = LARDER_ATTEND_OPTIONS_INIT;
    c_options.scale = 0.25f;
    c_options.window_left = 9;
    c_options.sinks = sinks.data();
    c_options.num_sinks = sinks.size();
    c_options.lse_form = LARDER_LSE_BASE2 | LARDER_LSE_INCLUDES_SINK | LARDER_LSE_HEADS_FIRST;
    std::vector<float> out(q.size(), kNan), c_out(q.size(), kNan);
    std::vector<float> lse(20, kNan), c_lse(20, kNan);
    REQUIRE(sequence.attend(1, view(rows(q, 4)), view(rows(out, 4)), lse.data(), options).ok());
    const larder_tensor query = rows(q, 4);
    const larder_tensor result = rows(c_out, 4);
    REQUIRE_OK(
        larder_sequence_attend(c_sequence.get(), 1, &query, &result, c_lse.data(), &c_options));
    CHECK(c_out == out);
    CHECK(c_lse == lse);
    CHECK(std::isfinite(out[0]));

    // The same rows as a batch.
    const std::vector<int32_t> ids = block_ids(c_sequence);
    const int32_t q_len = 5;
    const int32_t seq_len = 37;
    larder_attend_batch batch = LARDER_ATTEND_BATCH_INIT;
    std::vector<float> batch_out(q.size(), kNan);
    batch.q = query;
    batch.out = rows(batch_out, 4);
    batch.q_lens = &q_len;
    batch.seq_lens = &seq_len;
    batch.num_seqs = 1;
    batch.block_table = ids.data();
    batch.block_table_stride = 3;
    REQUIRE_OK(larder_pool_attend(c_pool.get(), 1, &batch, &c_options));
    CHECK(batch_out == out);
    batch.block_table_stride = -3;
    CHECK(larder_pool_attend(c_pool.get(), 1, &batch, &c_options) == LARDER_INVALID_ARGUMENT);
    CHECK(error().find("block_table has 1 rows of -3 entries") == 0);
  }
}

TEST_CASE("what read and gather give back is what was stored") {
  Node node;
  const CClient client = connect(node);
  larder_pool_options options = c_small_pool("c", LARDER_EXECUTION_ON_REQUEST);
  options.geometry.k_format = options.geometry.v_format = LARDER_KV_FORMAT_BF16;
  const CPool pool = open_pool(client, options);
  const CSequence sequence = begin(pool);
  std::vector<float> k(20 * kDim);
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i % 128);  // exact in bf16
  std::vector<float> v(k.rbegin(), k.rend());
  append_all(sequence, k, v);

  std::vector<int64_t> slots(20);
  size_t count = 0;
  CHECK(larder_sequence_last_slots(sequence.get(), slots.data(), 19, &count) ==
        LARDER_INVALID_ARGUMENT);
  CHECK(error() == "slots has a capacity of 19, 20 entries are needed");
  CHECK(count == 20);
  REQUIRE_OK(larder_sequence_last_slots(sequence.get(), slots.data(), 20, &count));
  std::vector<float> k_out(k.size(), kNan), v_out(v.size(), kNan);
  larder_tensor keys = rows(k_out);
  larder_tensor values = rows(v_out);
  REQUIRE_OK(larder_pool_read(pool.get(), 1, &keys, &values, slots.data(), slots.size()));
  CHECK(k_out == k);
  CHECK(v_out == v);

  k_out.assign(k.size(), kNan);
  const std::vector<int32_t> ids = block_ids(sequence);
  const int32_t seq_len = 20;
  larder_gather_batch batch = LARDER_GATHER_BATCH_INIT;
  batch.k_out = rows(k_out);  // V is not wanted
  batch.seq_lens = &seq_len;
  batch.num_seqs = 1;
  batch.block_table = ids.data();
  batch.block_table_stride = static_cast<int64_t>(ids.size());
  REQUIRE_OK(larder_pool_gather(pool.get(), 1, &batch));
  CHECK(k_out == k);

  k_out.assign(k.size(), kNan);
  const int32_t first_token = 17;
  batch.first_tokens = &first_token;
  REQUIRE_OK(larder_pool_gather(pool.get(), 1, &batch));
  CHECK(std::equal(k.begin() + 17 * kDim, k.end(), k_out.begin()));
  CHECK(std::all_of(k_out.begin() + 3 * kDim, k_out.end(), [](float x) { return std::isnan(x); }));
}

TEST_CASE("pool figures and memory are those of the C++ API") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kInProcess));
  REQUIRE(pool.ok());
  const CClient c_client = connect(node);
  uint64_t session = 0;
  uint64_t boot = 0;
  REQUIRE_OK(larder_client_session_id(c_client.get(), &session));
  REQUIRE_OK(larder_client_boot_id(c_client.get(), &boot));
  CHECK(session != client.session_id());
  CHECK(boot == client.boot_id());
  const CPool c_pool = open_pool(c_client, c_small_pool("p", LARDER_EXECUTION_IN_PROCESS));
  larder_pool_info info = LARDER_POOL_INFO_INIT;
  REQUIRE_OK(larder_pool_get_info(c_pool.get(), &info));
  CHECK(info.created == 0);
  CHECK(info.num_blocks == 8);
  CHECK(info.execution == LARDER_EXECUTION_IN_PROCESS);
  CHECK(info.geometry.block_tokens == 16);
  CHECK(info.geometry.k_format == LARDER_KV_FORMAT_NVFP4);
  CHECK(info.page_bytes == 1152);
  CHECK(info.block_stride_bytes == pool->block_stride_bytes());
  CHECK(info.layer_stride_bytes == pool->layer_stride_bytes());
  void* data = nullptr;
  REQUIRE_OK(larder_pool_data(c_pool.get(), &data));
  larder_block block = {-1, 0};
  REQUIRE_OK(larder_pool_allocate(c_pool.get(), 1, &block));
  const int64_t offset = block.id * info.block_stride_bytes + info.layer_stride_bytes + 5;
  static_cast<std::byte*>(data)[offset] = std::byte{0xAB};
  CHECK(pool->data().value()[offset] == std::byte{0xAB});
  CHECK(larder_pool_get_info(c_pool.get(), nullptr) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_pool_data(c_pool.get(), nullptr) == LARDER_INVALID_ARGUMENT);
}

TEST_CASE("handles may be destroyed parents first") {
  Node node;
  CClient client = connect(node);
  CPool pool = open_pool(client, c_small_pool("p", LARDER_EXECUTION_ON_REQUEST));
  CSequence sequence = begin(pool);
  client.reset();
  pool.reset();
  CHECK(node.ctl({"sessions"}).size() == 2);  // and larderctl's
  REQUIRE_OK(larder_sequence_extend(sequence.get(), 17));
  sequence.reset();
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 1; }));
}

TEST_CASE("a daemon that is gone is UNAVAILABLE, and destroying still works") {
  Node node;
  const CClient client = connect(node, 2'000'000);  // how long it waits for larderd
  const CPool pool = open_pool(client, c_small_pool("p", LARDER_EXECUTION_ON_REQUEST));
  const CSequence sequence = begin(pool);
  REQUIRE_OK(larder_sequence_extend(sequence.get(), 1));
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(std::chrono::seconds(10)).has_value());
  CHECK(larder_sequence_extend(sequence.get(), 16) == LARDER_UNAVAILABLE);
  CHECK(error().find(node.socket()) != std::string::npos);
  larder_block block = {-1, 0};
  CHECK(larder_pool_allocate(pool.get(), 1, &block) == LARDER_UNAVAILABLE);
  CHECK(block.id == -1);
  node.start_larderd();  // for the node's own end
  node.await_ready();
}

}  // namespace
}  // namespace larder::test
