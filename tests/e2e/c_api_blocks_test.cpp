// The C API on a node: blocks, prefixes, sequences that share them, pages, MLA and opaque pools.
#include <algorithm>
#include <vector>

#include "tests/e2e/c_handles.h"

namespace larder::test {
namespace {

std::vector<int32_t> tokens_from(int32_t first, int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = first + i;
  return tokens;
}

TEST_CASE("blocks are allocated all or nothing, published under a key and found again") {
  Node node;
  const CClient client = connect(node);
  const CPool pool = open_pool(client, c_small_pool("p", LARDER_EXECUTION_IN_PROCESS));
  std::vector<larder_block> blocks(9, {-1, 0});
  CHECK(larder_pool_allocate(pool.get(), 9, blocks.data()) == LARDER_RESOURCE_EXHAUSTED);
  CHECK(blocks[0].id == -1);
  CHECK(larder_pool_allocate(pool.get(), 2, nullptr) == LARDER_INVALID_ARGUMENT);
  CHECK(error() == "blocks with 2 entries is NULL");
  CHECK(stats_of(pool).open == 0);
  REQUIRE_OK(larder_pool_allocate(pool.get(), 2, blocks.data()));
  larder_group_stats stats = stats_of(pool);
  CHECK(stats.capacity == 8);
  CHECK(stats.open == 2);
  CHECK(stats.free == 6);
  CHECK(std::string(stats.name) == "attention");

  const std::vector<int32_t> tokens = tokens_from(0, 37);
  const larder_bytes extra[2] = {{"image", 5}, {nullptr, 0}};
  std::vector<larder_published_block> published(2);
  REQUIRE_OK(larder_pool_publish(pool.get(), tokens.data(), tokens.size(), blocks.data(), 2,
                                 "adapter", extra, 2, published.data()));
  CHECK(published[0].block.id == blocks[0].id);
  CHECK(published[1].block.id == blocks[1].id);
  CHECK(!std::equal(published[0].key, published[0].key + 32, published[1].key));
  CHECK(stats_of(pool).published == 2);

  std::vector<larder_block> found(2, {-1, 0});
  size_t count = 99;
  int64_t hit = 99;
  const auto look_up = [&](int32_t hold, const char* adapter, const larder_bytes* bytes,
                           larder_block* out, size_t capacity) {
    return larder_pool_lookup(pool.get(), tokens.data(), tokens.size(), hold, adapter, bytes,
                              bytes == nullptr ? 0 : 2, out, capacity, &count, &hit);
  };
  REQUIRE_OK(look_up(0, "adapter", extra, nullptr, 0));
  CHECK(hit == 32);
  CHECK(count == 2);
  REQUIRE_OK(look_up(0, nullptr, extra, nullptr, 0));
  CHECK(hit == 0);
  REQUIRE_OK(look_up(0, "adapter", nullptr, nullptr, 0));
  CHECK(hit == 0);
  // A hold that has no place in the array is not taken: after one release nobody holds the blocks.
  CHECK(look_up(1, "adapter", extra, found.data(), 1) == LARDER_INVALID_ARGUMENT);
  CHECK(error() == "blocks has a capacity of 1, 2 entries are needed");
  CHECK(count == 2);
  CHECK(found[0].id == -1);
  CHECK(look_up(1, "adapter", extra, nullptr, 2) == LARDER_INVALID_ARGUMENT);
  CHECK(look_up(2, "adapter", extra, found.data(), 2) == LARDER_INVALID_ARGUMENT);
  CHECK(error() == "hold is 2, expected 0 or 1");
  REQUIRE_OK(larder_pool_release(pool.get(), blocks.data(), 2));
  CHECK(stats_of(pool).cached == 2);
  REQUIRE_OK(look_up(1, "adapter", extra, found.data(), 2));
  CHECK(hit == 32);
  CHECK(found[1].id == blocks[1].id);
  CHECK(stats_of(pool).cached == 0);
  REQUIRE_OK(larder_pool_release(pool.get(), found.data(), 2));
  CHECK(stats_of(pool).cached == 2);

  larder_group_stats none = {};
  CHECK(larder_pool_stats(pool.get(), &none, 0, &count) == LARDER_INVALID_ARGUMENT);
  CHECK(count == 1);
  count = 0;
  REQUIRE_OK(larder_pool_stats(pool.get(), nullptr, 0, &count));
  CHECK(count == 1);
}

TEST_CASE("a released block is refused by its generation") {
  Node node;
  const CClient client = connect(node);
  const CPool pool = open_pool(client, c_small_pool("p", LARDER_EXECUTION_IN_PROCESS));
  larder_block block = {-1, 0};
  REQUIRE_OK(larder_pool_allocate(pool.get(), 1, &block));
  REQUIRE_OK(larder_pool_release(pool.get(), &block, 1));
  CHECK(larder_pool_release(pool.get(), &block, 1) != LARDER_OK);
  CHECK(error().find(std::to_string(block.id)) != std::string::npos);
}

TEST_CASE("sequences adopt, fork, truncate and end as in C++") {
  Node node;
  const CClient client = connect(node);
  const CPool pool = open_pool(client, c_small_pool("p", LARDER_EXECUTION_ON_REQUEST));
  const CSequence first = begin(pool);
  std::vector<float> k = random_values(33 * kDim, 1);
  std::vector<float> v = random_values(33 * kDim, 2);
  append_all(first, k, v);
  const std::vector<int32_t> tokens = tokens_from(7, 33);
  REQUIRE_OK(larder_sequence_publish(first.get(), tokens.data(), tokens.size(), nullptr));

  const CSequence second = begin(pool);
  int64_t adopted = -1;
  REQUIRE_OK(larder_sequence_adopt_prefix(second.get(), tokens.data(), 33, nullptr, &adopted));
  CHECK(adopted == 32);
  CHECK(block_ids(second) == std::vector<int32_t>{block_ids(first)[0], block_ids(first)[1]});
  CHECK(larder_sequence_adopt_prefix(second.get(), tokens.data(), 33, nullptr, &adopted) ==
        LARDER_INVALID_ARGUMENT);

  larder_sequence* raw = nullptr;
  REQUIRE_OK(larder_sequence_fork(first.get(), &raw));
  const CSequence fork(raw);
  CHECK(block_ids(fork) == block_ids(first));
  REQUIRE_OK(larder_sequence_extend(fork.get(), 1));  // its own copy of the partly filled block
  CHECK(block_ids(fork)[1] == block_ids(first)[1]);
  CHECK(block_ids(fork)[2] != block_ids(first)[2]);
  CHECK(layer_bytes(pool, 1, {block_ids(fork)[2]}).size() == 1152);

  int64_t num_tokens = -1;
  REQUIRE_OK(larder_sequence_num_tokens(fork.get(), &num_tokens));
  CHECK(num_tokens == 34);
  CHECK(larder_sequence_truncate(fork.get(), 35) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_sequence_truncate(fork.get(), -1) == LARDER_INVALID_ARGUMENT);
  REQUIRE_OK(larder_sequence_truncate(fork.get(), 16));
  REQUIRE_OK(larder_sequence_num_tokens(fork.get(), &num_tokens));
  CHECK(num_tokens == 16);
  std::vector<larder_block> held(3, {-1, 0});
  size_t count = 0;
  REQUIRE_OK(larder_sequence_blocks(first.get(), held.data(), 3, &count));
  CHECK(count == 3);
  CHECK(held[2].id == block_ids(first)[2]);
  REQUIRE_OK(larder_sequence_end(first.get()));
  REQUIRE_OK(larder_sequence_num_tokens(first.get(), &num_tokens));
  CHECK(num_tokens == 0);
  CHECK(block_ids(first).empty());
  CHECK(larder_sequence_extend(first.get(), -1) == LARDER_INVALID_ARGUMENT);
  CHECK(error().find("num_tokens is -1") != std::string::npos);
}

TEST_CASE("pages are copied, scrubbed, summed and moved to an engine's layout and back") {
  Node node;
  const CClient client = connect(node);
  const CPool pool = open_pool(client, c_small_pool("p", LARDER_EXECUTION_IN_PROCESS));
  std::vector<larder_block> blocks(4);
  REQUIRE_OK(larder_pool_allocate(pool.get(), 4, blocks.data()));
  std::vector<int32_t> ids;
  for (const larder_block& block : blocks) ids.push_back(block.id);
  REQUIRE_OK(larder_pool_scrub(pool.get(), ids.data(), 4));
  std::vector<std::byte> written(2 * 1152);
  for (size_t i = 0; i < written.size(); ++i) written[i] = static_cast<std::byte>(i * 7 % 120);
  REQUIRE_OK(larder_pool_write_pages(pool.get(), 1, ids.data(), 2, written.data(), written.size()));
  CHECK(layer_bytes(pool, 1, {ids[0], ids[1]}) == written);
  CHECK(larder_pool_write_pages(pool.get(), 1, ids.data(), 2, written.data(), 1152) ==
        LARDER_INVALID_ARGUMENT);
  CHECK(larder_pool_read_pages(pool.get(), 1, ids.data(), 2, nullptr, 2304) ==
        LARDER_INVALID_ARGUMENT);
  // Layer 0, which is zeros, then layer 1 of each.
  std::vector<std::byte> whole(2 * 2304, std::byte{9});
  REQUIRE_OK(larder_pool_read_blocks(pool.get(), ids.data(), 2, whole.data(), whole.size()));
  std::vector<std::byte> expected(2 * 2304);
  std::copy(written.begin(), written.begin() + 1152, expected.begin() + 1152);
  std::copy(written.begin() + 1152, written.end(), expected.begin() + 3 * 1152);
  CHECK(whole == expected);
  CHECK(larder_pool_write_blocks(pool.get(), ids.data(), 2, whole.data(), 2304) ==
        LARDER_INVALID_ARGUMENT);
  REQUIRE_OK(larder_pool_write_blocks(pool.get(), ids.data(), 2, whole.data(), whole.size()));
  CHECK(layer_bytes(pool, 1, {ids[0], ids[1]}) == written);

  // Blocks 2 and 3 become copies of 0 and 1.
  REQUIRE_OK(larder_pool_copy(pool.get(), blocks.data(), blocks.data() + 2, 2));
  std::vector<uint64_t> sums(4);
  REQUIRE_OK(larder_pool_checksum(pool.get(), ids.data(), 4, sums.data()));
  CHECK(sums[0] == sums[2]);
  CHECK(sums[1] == sums[3]);
  CHECK(sums[0] != sums[1]);
  REQUIRE_OK(larder_pool_scrub(pool.get(), &ids[3], 1));
  CHECK(layer_bytes(pool, 1, {ids[3]}) == std::vector<std::byte>(1152));

  // HND without gaps is the pool's own layout: the same bytes.
  larder_geometry geometry = c_small_pool("p", 0).geometry;
  geometry.num_layers = 1;
  std::vector<std::byte> engine(2 * 1152, std::byte{0xEE});
  larder_paged_kv paged = LARDER_PAGED_KV_INIT;
  REQUIRE_OK(larder_dense_pages(engine.data(), &geometry, 2, LARDER_PAGE_ORDER_HND,
                                LARDER_V_SCALE_ORDER_LINEAR, &paged));
  REQUIRE_OK(larder_pool_export_pages(pool.get(), 1, ids.data(), 2, &paged));
  CHECK(engine == written);
  const std::vector<int32_t> swapped = {ids[1], ids[0]};
  REQUIRE_OK(larder_pool_import_pages(pool.get(), 1, swapped.data(), 2, &paged));
  CHECK(layer_bytes(pool, 1, swapped) == written);
  paged.num_pages = 1;
  CHECK(larder_pool_export_pages(pool.get(), 1, ids.data(), 2, &paged) == LARDER_INVALID_ARGUMENT);
}

TEST_CASE("MLA pools attend densely and over chosen tokens") {
  Node node;
  const CClient client = connect(node);
  larder_pool_options options = c_small_pool("mla", LARDER_EXECUTION_IN_PROCESS);
  REQUIRE_OK(larder_mla_geometry(1, 16, LARDER_MLA_ROW_BF16, &options.geometry));
  const CPool pool = open_pool(client, options);
  const CSequence sequence = begin(pool);
  REQUIRE_OK(larder_sequence_extend(sequence.get(), 2));
  // Two tokens, latent 1 and 3; attention of a zero query is their mean.
  std::vector<float> latent(2 * 512, 1.0f), rope(2 * 64, 0.0f), q(576, 0.0f), out(512, kNan);
  std::fill(latent.begin() + 512, latent.end(), 3.0f);
  const larder_tensor k = larder_dense_tensor(latent.data(), LARDER_DTYPE_FP32, 2, 1, 512);
  const larder_tensor v = larder_dense_tensor(rope.data(), LARDER_DTYPE_FP32, 2, 1, 64);
  REQUIRE_OK(larder_sequence_append(sequence.get(), 0, &k, &v));
  larder_attend_options attend = LARDER_ATTEND_OPTIONS_INIT;
  attend.scale = 0.1f;
  const larder_tensor query = larder_dense_tensor(q.data(), LARDER_DTYPE_FP32, 1, 1, 576);
  const larder_tensor result = larder_dense_tensor(out.data(), LARDER_DTYPE_FP32, 1, 1, 512);
  REQUIRE_OK(larder_sequence_attend(sequence.get(), 0, &query, &result, nullptr, &attend));
  CHECK(out[0] == 2.0f);
  CHECK(out[511] == 2.0f);

  int32_t indices[3] = {block_ids(sequence)[0] * 16 + 1, -1, block_ids(sequence)[0] * 16};
  const int32_t length = 2;
  larder_sparse_batch batch = LARDER_SPARSE_BATCH_INIT;
  batch.q = query;
  batch.out = result;
  batch.indices = indices;
  batch.top_k = 3;
  batch.topk_lens = &length;  // the third entry does not count
  REQUIRE_OK(larder_pool_sparse_attend(pool.get(), 0, &batch, &attend));
  CHECK(out[0] == 3.0f);
  batch.topk_lens = nullptr;
  REQUIRE_OK(larder_pool_sparse_attend(pool.get(), 0, &batch, &attend));
  CHECK(out[0] == 2.0f);
  batch.top_k = -1;
  CHECK(larder_pool_sparse_attend(pool.get(), 0, &batch, &attend) == LARDER_INVALID_ARGUMENT);
}

TEST_CASE("opaque blocks are bytes, and options that no pool can have are refused by name") {
  Node node;
  const CClient client = connect(node);
  larder_pool_options options = c_small_pool("opaque", LARDER_EXECUTION_IN_PROCESS);
  options.opaque_block_bytes = 96;
  const CPool pool = open_pool(client, options);
  larder_block block = {-1, 0};
  REQUIRE_OK(larder_pool_allocate(pool.get(), 1, &block));
  const std::vector<std::byte> bytes(96, std::byte{0x5A});
  REQUIRE_OK(larder_pool_write_pages(pool.get(), 0, &block.id, 1, bytes.data(), 96));
  CHECK(layer_bytes(pool, 0, {block.id}) == bytes);

  const auto refusal = [&](auto change) {
    larder_pool_options wrong = c_small_pool("wrong", LARDER_EXECUTION_IN_PROCESS);
    change(wrong);
    auto* handle = reinterpret_cast<larder_pool*>(8);
    CHECK(larder_open_pool(client.get(), &wrong, &handle) == LARDER_INVALID_ARGUMENT);
    CHECK(handle == nullptr);
    return error();
  };
  CHECK(refusal([](auto& o) { o.execution = 2; }) ==
        "execution is 2, expected 0 to 1 (in_process, on_request)");
  CHECK(refusal([](auto& o) { o.encoder = 3; }).find("encoder is 3") == 0);
  CHECK(refusal([](auto& o) { o.key_transform = 4; }).find("key_transform is 4") == 0);
  CHECK(refusal([](auto& o) { o.layout = 2; }).find("layout is 2") == 0);
  CHECK(refusal([](auto& o) { o.reserve_block_zero = -1; }).find("reserve_block_zero is -1") == 0);
  CHECK(refusal([](auto& o) { o.num_k_scales = 1; }) == "k_scales with 1 entries is NULL");
  CHECK(refusal([](auto& o) { o.struct_size = 0; }).find("options: struct_size is 0") == 0);
  CHECK(refusal([](auto& o) { o.geometry.block_tokens = 0; }).find("block_tokens") !=
        std::string::npos);
  const double scales[3] = {1.0, 1.0, 1.0};
  CHECK(refusal([&](auto& o) { o.v_scales = scales, o.num_v_scales = 3; }).find("3") !=
        std::string::npos);
}

}  // namespace
}  // namespace larder::test
