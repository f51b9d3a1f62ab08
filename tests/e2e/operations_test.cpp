// Every operation of a pool, in process and on request: the same results bit for bit, and the same
// refusals. What the results must be is judged in tests/kernels and by tests/cases.
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include "tests/e2e/executions.h"
#include "tests/support/node.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

// 2 layers, 2 KV heads, K of 64 in one format and V of 32 in another, 40 tokens in 3 blocks.
struct Filled {
  Filled(Client& client, Execution execution, const std::string& name, PoolOptions options)
      : pool([&] {
          options.name = name + (execution == Execution::kInProcess ? "-here" : "-there");
          options.model = "test";
          options.num_blocks = 8;
          options.execution = execution;
          auto opened = client.open_pool(options);
          REQUIRE_MESSAGE(opened.ok(), opened.status().to_string());
          return std::move(*opened);
        }()) {
    auto allocated = pool.allocate(3);
    REQUIRE(allocated.ok());
    handles = *allocated;
    for (const BlockHandle& block : handles) blocks.push_back(block.id);
    for (int token = 0; token < 40; ++token)
      slots.push_back(blocks[static_cast<size_t>(token / 16)] * 16 + token % 16);
  }

  Pool pool;
  std::vector<BlockHandle> handles;
  std::vector<int32_t> blocks;
  std::vector<int64_t> slots;
};

PoolOptions mixed_options() {
  PoolOptions options;
  options.geometry = {2, 2, 16, 64, 32, KvFormat::kNvfp4, KvFormat::kFp8E4m3};
  options.encoder = Encoder::kBestScale;
  options.key_transform = KeyTransform::kCentredRotated;
  options.key_offsets = random_values(2 * 2 * 64, 1);
  options.k_scales = {0.5, 0.25};
  options.v_scales = {2.0};
  return options;
}

void fill_attention(Filled& filled) {
  for (int layer = 0; layer < 2; ++layer) {
    std::vector<float> k = random_values(40 * 2 * 64, 2 + static_cast<uint64_t>(layer));
    std::vector<float> v = random_values(40 * 2 * 32, 4 + static_cast<uint64_t>(layer));
    REQUIRE(filled.pool.append(layer, view(k, 2, 64), view(v, 2, 32), filled.slots).ok());
  }
}

TEST_CASE("attention with every option gives the same bits in both executions") {
  Node node;
  Client client = node.connect();
  std::vector<uint32_t> out_bits[2], lse_bits[2];
  std::vector<uint8_t> packed[2], scales[2];
  for (size_t i = 0; i < 2; ++i) {
    Filled filled(client, kExecutions[i], "attend", mixed_options());
    fill_attention(filled);
    std::vector<float> q = random_values(5 * 4 * 64, 9);
    std::vector<float> out(5 * 4 * 32, kNan), lse(5 * 4, kNan);
    const std::vector<int32_t> q_lens = {2, 3}, seq_lens = {7, 40};
    std::vector<int32_t> table = {filled.blocks[0], -1, -1};
    table.insert(table.end(), filled.blocks.begin(), filled.blocks.end());
    std::vector<uint8_t> mask(64);
    for (size_t byte = 0; byte < mask.size(); ++byte)
      mask[byte] = static_cast<uint8_t>(0xB7 ^ (byte * 29));
    const std::vector<int64_t> mask_offsets = {40, 3};
    const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f};
    AttendBatch batch;
    batch.q = view(q, 4, 64);
    batch.out = view(out, 4, 32);
    batch.lse = lse.data();
    batch.q_lens = q_lens;
    batch.seq_lens = seq_lens;
    batch.block_table = table;
    batch.block_table_stride = 3;
    batch.mask = mask;
    batch.mask_offsets = mask_offsets;
    AttendOptions options;
    options.window_left = 30;
    options.soft_cap = 5.0f;
    options.sinks = sinks;
    options.num_splits = 3;
    options.lse_form = {true, true, true};
    REQUIRE(filled.pool.attend(1, batch, options).ok());
    out_bits[i] = bits(out);
    lse_bits[i] = bits(lse);
    CHECK(std::isfinite(out[0]));

    // NVFP4 output: two values a byte, scales in tiles that start at row 7.
    packed[i].assign(5 * 4 * 16, 0xAB);
    scales[i].assign(128 * 8, 0xCD);
    batch.out = dense_tensor(packed[i].data(), Dtype::kE2m1x2, 5, 4, 16);
    batch.out_sf = scales[i];
    options.out_sf_scale = 4.0f;
    options.out_sf_first_row = 7;
    REQUIRE(filled.pool.attend(1, batch, options).ok());
    CHECK(scales[i].back() == 0xCD);
  }
  CHECK(out_bits[0] == out_bits[1]);
  CHECK(lse_bits[0] == lse_bits[1]);
  CHECK(packed[0] == packed[1]);
  CHECK(scales[0] == scales[1]);
}

TEST_CASE("gather and read give the same bits in both executions, and leave other rows alone") {
  Node node;
  Client client = node.connect({.arena_bytes = 1 << 20});
  std::vector<uint32_t> gathered[2], read[2];
  for (size_t i = 0; i < 2; ++i) {
    Filled filled(client, kExecutions[i], "gather", mixed_options());
    fill_attention(filled);
    std::vector<float> k(2 * 45 * 2 * 64, kNan), v(2 * 45 * 2 * 32, kNan);
    const std::vector<int32_t> seq_lens = {40, 17};
    std::vector<int32_t> table = filled.blocks;
    table.insert(table.end(), {filled.blocks[2], filled.blocks[0], -5});
    GatherBatch batch;
    batch.k_out = view(k, 2, 64);
    batch.v_out = view(v, 2, 32);
    batch.seq_lens = seq_lens;
    batch.block_table = table;
    batch.block_table_stride = 3;
    batch.rows_per_sequence = 45;
    REQUIRE(filled.pool.gather(0, batch).ok());
    gathered[i] = bits(k);
    CHECK(std::isnan(k[40 * 2 * 64]));
    CHECK(std::isfinite(k[40 * 2 * 64 - 1]));
    CHECK(std::isfinite(v[(45 + 16) * 2 * 32]));
    CHECK(std::isnan(v[(45 + 17) * 2 * 32]));
    const std::vector<int64_t> slots = {filled.slots[3], -1, filled.slots[39]};
    std::vector<float> k_rows(3 * 2 * 64, kNan), none;
    REQUIRE(filled.pool
                .read(0, view(k_rows, 2, 64), dense_tensor(nullptr, Dtype::kFp32, 0, 2, 32), slots)
                .ok());
    CHECK(std::isnan(k_rows[2 * 64]));
    CHECK(std::equal(k_rows.begin(), k_rows.begin() + 2 * 64, k.begin() + 3 * 2 * 64));
    CHECK(std::equal(k_rows.begin() + 2 * 2 * 64, k_rows.end(), k.begin() + 39 * 2 * 64));
    read[i] = bits(k_rows);
  }
  CHECK(gathered[0] == gathered[1]);
  CHECK(read[0] == read[1]);
}

TEST_CASE("MLA pools append, attend, attend sparsely and gather alike in both executions") {
  Node node;
  Client client = node.connect();
  for (const MlaRow row : {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16}) {
    std::vector<uint32_t> dense[2], sparse[2];
    std::vector<uint8_t> staged[2];
    for (size_t i = 0; i < 2; ++i) {
      PoolOptions options;
      options.geometry = mla_geometry(2, 16, row);
      options.k_scales = {0.5};
      Filled filled(client, kExecutions[i], std::string(name(row)), options);
      CHECK(filled.pool.page_bytes() == 16 * mla_row_bytes(row));
      std::vector<float> latent = random_values(40 * 512, 11), rope = random_values(40 * 64, 12);
      REQUIRE(filled.pool.append(1, view(latent, 1, 512), view(rope, 1, 64), filled.slots).ok());
      std::vector<float> q = random_values(2 * 3 * 576, 13);
      std::vector<float> out(2 * 3 * 512, kNan), lse(2 * 3, kNan);
      const std::vector<int32_t> q_lens = {2}, seq_lens = {40};
      AttendBatch batch;
      batch.q = view(q, 3, 576);
      batch.out = view(out, 3, 512);
      batch.lse = lse.data();
      batch.q_lens = q_lens;
      batch.seq_lens = seq_lens;
      batch.block_table = filled.blocks;
      batch.block_table_stride = 3;
      CHECK(filled.pool.attend(1, batch).code() == ErrorCode::kInvalidArgument);  // no scale
      REQUIRE(filled.pool.attend(1, batch, {.scale = 0.05f}).ok());
      dense[i] = bits(out);
      CHECK(std::isfinite(out[0]));

      std::vector<int32_t> indices(2 * 4, -1);
      indices[1] = static_cast<int32_t>(filled.slots[39]);
      indices[3] = static_cast<int32_t>(filled.slots[0]);
      indices[6] = 1 << 30;
      SparseBatch picked;
      picked.q = batch.q;
      picked.out = batch.out;
      picked.lse = lse.data();
      picked.indices = indices;
      picked.top_k = 4;
      REQUIRE(filled.pool.sparse_attend(1, picked, {.scale = 0.05f}).ok());
      sparse[i] = bits(out);
      CHECK(out[3 * 512] == 0.0f);  // the second row has no key
      CHECK(lse[3] == -std::numeric_limits<float>::infinity());

      staged[i].assign(40 * 576, 0xEE);
      GatherBatch staging;
      staging.k_out = dense_tensor(staged[i].data(), Dtype::kFp8E4m3, 40, 1, 576);
      staging.v_out = dense_tensor(nullptr, Dtype::kFp32, 0, 1, 512);
      staging.seq_lens = seq_lens;
      staging.block_table = filled.blocks;
      staging.block_table_stride = 3;
      REQUIRE(filled.pool.gather(1, staging).ok());
    }
    CHECK(dense[0] == dense[1]);
    CHECK(sparse[0] == sparse[1]);
    CHECK(staged[0] == staged[1]);
  }
}

TEST_CASE("pages go out, through another layout and back in, unchanged") {
  Node node;
  Client client = node.connect({.arena_bytes = 1 << 20});
  for (const Execution execution : kExecutions) {
    Filled filled(client, execution, "pages", mixed_options());
    fill_attention(filled);
    const auto page_bytes = static_cast<size_t>(filled.pool.page_bytes());
    std::vector<std::byte> before(3 * page_bytes), after(3 * page_bytes), foreign(3 * page_bytes);
    REQUIRE(filled.pool.read_pages(1, filled.blocks, before).ok());
    AttentionGeometry small = filled.pool.geometry();
    small.num_layers = 1;
    small.block_tokens = 4;
    const PagedKv paged = dense_pages(foreign.data(), small, 12, PageOrder::kNhd);
    REQUIRE(filled.pool.export_pages(1, filled.blocks, paged).ok());
    CHECK(foreign != before);
    auto sums = filled.pool.checksum(filled.blocks);
    REQUIRE(sums.ok());
    REQUIRE(filled.pool.scrub(std::span(filled.blocks).first(2)).ok());
    REQUIRE(filled.pool.read_pages(1, filled.blocks, after).ok());
    CHECK(std::count(after.begin(), after.end(), std::byte{0}) >=
          static_cast<int64_t>(2 * page_bytes));
    CHECK(std::equal(after.begin() + static_cast<std::ptrdiff_t>(2 * page_bytes), after.end(),
                     before.begin() + static_cast<std::ptrdiff_t>(2 * page_bytes)));
    CHECK(*filled.pool.checksum(filled.blocks) != *sums);
    REQUIRE(filled.pool.import_pages(1, filled.blocks, paged).ok());
    REQUIRE(filled.pool.read_pages(1, filled.blocks, after).ok());
    CHECK(after == before);
    // Layer 0 was scrubbed and not brought back.
    CHECK((*filled.pool.checksum(filled.blocks))[0] != (*sums)[0]);
    CHECK((*filled.pool.checksum(filled.blocks))[2] == (*sums)[2]);
  }
}

TEST_CASE("whole blocks go out and come in, layer by layer, and their neighbours stay") {
  Node node;
  Client client = node.connect({.arena_bytes = 1 << 20});
  for (const Execution execution : kExecutions)
    for (const KvLayout layout : {KvLayout::kBlhnc, KvLayout::kLbhnc}) {
      PoolOptions options = mixed_options();
      options.layout = layout;
      Filled filled(client, execution, layout == KvLayout::kBlhnc ? "blhnc" : "lbhnc", options);
      const size_t page_bytes = 32 * 68;  // rows of 32 + 4 bytes of K and 32 of V
      REQUIRE(filled.pool.block_bytes() == 2 * page_bytes);
      REQUIRE(filled.pool.scrub(filled.blocks).ok());
      std::vector<std::byte> written(4 * page_bytes), read(6 * page_bytes), pages(3 * page_bytes);
      for (size_t i = 0; i < written.size(); ++i) written[i] = static_cast<std::byte>(i * 7 % 251);
      const std::vector<int32_t> outer = {filled.blocks[2], filled.blocks[0]};
      REQUIRE(filled.pool.write_blocks(outer, written).ok());
      for (int layer = 0; layer < 2; ++layer) {
        REQUIRE(filled.pool.read_pages(layer, filled.blocks, pages).ok());
        std::vector<std::byte> expected(3 * page_bytes);
        const std::byte* of_layer = written.data() + static_cast<size_t>(layer) * page_bytes;
        std::copy_n(of_layer + 2 * page_bytes, page_bytes, expected.data());
        std::copy_n(of_layer, page_bytes, expected.data() + 2 * page_bytes);
        CHECK(pages == expected);
      }
      REQUIRE(filled.pool.read_blocks(std::vector{outer[0], outer[1], outer[0]}, read).ok());
      CHECK(std::equal(written.begin(), written.end(), read.begin()));
      CHECK(std::equal(read.begin(), read.begin() + 2 * page_bytes, read.begin() + 4 * page_bytes));
      CHECK(filled.pool.read_blocks(outer, read).message() ==
            "bytes has 13056 entries, 2 blocks of 4352 bytes were named");
      CHECK(filled.pool.write_blocks(std::vector<int32_t>{outer[0], 8}, written).code() ==
            ErrorCode::kInvalidArgument);
    }
}

TEST_CASE("an opaque pool holds bytes and refuses to be attended") {
  Node node;
  Client client = node.connect();
  for (const Execution execution : kExecutions) {
    PoolOptions options;
    options.geometry.block_tokens = 16;
    options.opaque_block_bytes = 1000;
    Filled filled(client, execution, "opaque", options);
    CHECK(filled.pool.page_bytes() == 1000);
    std::vector<std::byte> bytes(3000), back(3000);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
    REQUIRE(filled.pool.write_pages(0, filled.blocks, bytes).ok());
    REQUIRE(filled.pool.read_blocks(filled.blocks, back).ok());
    CHECK(bytes == back);
    auto fresh = filled.pool.allocate(1);
    REQUIRE(fresh.ok());
    REQUIRE(filled.pool.copy(std::span(filled.handles).first(1), *fresh).ok());
    const std::vector<int32_t> pair = {filled.blocks[0], fresh->front().id};
    const auto sums = filled.pool.checksum(pair);
    REQUIRE(sums.ok());
    CHECK((*sums)[0] == (*sums)[1]);
    std::vector<float> values(64);
    const std::vector<int64_t> slots = {filled.slots[0]};
    const Status refused = filled.pool.append(0, view(values, 1, 64), view(values, 1, 64), slots);
    CHECK(refused.code() == ErrorCode::kUnsupported);
    CHECK(refused.message().find("opaque") != std::string::npos);
    CHECK(filled.pool.write_pages(0, filled.blocks, std::span(bytes).first(2999)).code() ==
          ErrorCode::kInvalidArgument);
  }
}

TEST_CASE("on request, blocks of nobody are neither read nor written") {
  Node node;
  Client client = node.connect();
  Filled filled(client, Execution::kOnRequest, "rights", mixed_options());
  fill_attention(filled);
  const std::vector<int32_t> free_block = {[&] {
    auto allocated = filled.pool.allocate(1);
    REQUIRE(allocated.ok());
    REQUIRE(filled.pool.release(*allocated).ok());
    return allocated->front().id;
  }()};
  const std::vector<int64_t> free_slot = {free_block[0] * 16};
  std::vector<std::byte> page(static_cast<size_t>(filled.pool.page_bytes()));
  std::vector<float> k(2 * 64);
  const TensorView none = dense_tensor(nullptr, Dtype::kFp32, 0, 2, 32);
  CHECK(filled.pool.read(0, view(k, 2, 64), none, free_slot).code() ==
        ErrorCode::kPermissionDenied);
  CHECK(filled.pool.read_pages(0, free_block, page).code() == ErrorCode::kPermissionDenied);
  CHECK(filled.pool.write_pages(0, free_block, page).code() == ErrorCode::kPermissionDenied);
  CHECK(filled.pool.write_blocks(free_block, std::vector<std::byte>(2 * page.size())).code() ==
        ErrorCode::kPermissionDenied);
  CHECK(filled.pool.scrub(free_block).code() == ErrorCode::kPermissionDenied);
  CHECK(filled.pool.checksum(free_block).status().code() == ErrorCode::kPermissionDenied);
  // Published blocks may be read by all, and written by none.
  std::vector<int32_t> tokens(32);
  std::iota(tokens.begin(), tokens.end(), 0);
  REQUIRE(filled.pool.publish(tokens, std::span(filled.handles).first(2)).ok());
  const auto published = std::span(filled.blocks).first(1);
  CHECK(filled.pool.read_pages(0, published, page).ok());
  CHECK(filled.pool.scrub(published).code() == ErrorCode::kPermissionDenied);
  CHECK(filled.pool.write_pages(0, published, page).code() == ErrorCode::kPermissionDenied);
  const std::vector<int32_t> beyond = {8};
  CHECK(filled.pool.checksum(beyond).status().code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("key offsets are part of a pool's identity, however many there are") {
  Node node;
  Client client = node.connect();
  PoolOptions options = mixed_options();
  options.name = "wide";
  options.model = "test";
  options.num_blocks = 2;
  options.geometry = {64, 8, 16, 128, 128, KvFormat::kNvfp4, KvFormat::kNvfp4};
  options.k_scales = {};
  options.key_offsets = random_values(64 * 8 * 128, 21);  // 256 KiB: more than a message
  auto pool = client.open_pool(options);
  REQUIRE_MESSAGE(pool.ok(), pool.status().to_string());
  Client other = node.connect();
  CHECK(other.open_pool(options).ok());
  PoolOptions changed = options;
  changed.key_offsets.back() += 1.0f;
  const auto refused = other.open_pool(changed);
  CHECK(refused.status().code() == ErrorCode::kInvalidArgument);
  CHECK(refused.status().message().find("key_offsets") != std::string::npos);
  changed.key_offsets.pop_back();
  CHECK(other.open_pool(changed).status().code() == ErrorCode::kInvalidArgument);
  changed.key_offsets.push_back(kNan);
  CHECK(other.open_pool(changed).status().code() == ErrorCode::kInvalidArgument);
  changed.key_offsets = {};
  CHECK(other.open_pool(changed).status().code() == ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace larder::test
