// sparse_mla against the float64 oracle, and the places where its entries may stand.
#include <cmath>
#include <functional>
#include <limits>
#include <sys/mman.h>

#include <doctest/doctest.h>

#include "tests/kernels/attend_call.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlockTokens = 8;
constexpr int64_t kSlots = 12 * kBlockTokens;

struct SparseResult {
  std::vector<float> out;
  std::vector<float> lse;
  bool operator==(const SparseResult&) const = default;
};

// Queries over a pool of NaN, of which some slots hold rows.
struct SparseCall {
  SparseCall(MlaRow row, int64_t rows, int64_t heads, std::mt19937_64& engine)
      : num_rows(rows),
        num_heads(heads),
        pool(mla_geometry(1, kBlockTokens, row), kSlots / kBlockTokens, std::byte{0x7F}, 5) {
    pool.layer().k_scale = 0.5f;
    for (int64_t slot = 0; slot < kSlots; slot += 1 + static_cast<int64_t>(engine() % 2)) {
      test::fill_mla_row(pool, slot, engine);
      written.push_back(static_cast<int32_t>(slot));
    }
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(rows * heads * kMlaKeyDim));
    for (float& x : q) x = normal(engine);
  }

  int32_t any_written(std::mt19937_64& engine) const { return written[engine() % written.size()]; }

  SparseMlaParams params(SparseResult& result) {
    result.out.assign(static_cast<size_t>(num_rows * num_heads * kMlaLatentDim), NAN);
    result.lse.assign(static_cast<size_t>(num_rows * num_heads), NAN);
    SparseMlaParams params;
    params.layer = pool.layer();
    params.q = dense_tensor(q.data(), Dtype::kFp32, num_rows, num_heads, kMlaKeyDim);
    params.output.out =
        dense_tensor(result.out.data(), Dtype::kFp32, num_rows, num_heads, kMlaLatentDim);
    params.output.lse = result.lse.data();
    params.output.lse_form = lse_form;
    params.indices = indices.data();
    params.top_k = static_cast<int64_t>(indices.size()) / num_rows;
    params.topk_lens = topk_lens.empty() ? nullptr : topk_lens.data();
    params.scale = scale;
    params.sinks = sinks.empty() ? nullptr : sinks.data();
    return params;
  }

  SparseResult run() {
    SparseResult result;
    const Status status = run_sparse_mla(params(result));
    LARDER_CHECK(status.ok(), status.to_string());
    return result;
  }

  test::DenseResult oracle() {
    test::DenseResult all;
    const auto top_k = static_cast<int64_t>(indices.size()) / num_rows;
    for (int64_t row = 0; row < num_rows; ++row) {
      test::DenseAttention call;
      call.q_len = 1;
      call.num_q_heads = num_heads;
      call.num_kv_heads = 1;
      call.k_dim = kMlaKeyDim;
      call.v_dim = kMlaLatentDim;
      const auto begin = q.begin() + row * num_heads * kMlaKeyDim;
      call.q.assign(begin, begin + num_heads * kMlaKeyDim);
      const int64_t entries = topk_lens.empty() ? top_k : topk_lens[static_cast<size_t>(row)];
      for (int64_t i = 0; i < entries; ++i) {
        const int32_t slot = indices[static_cast<size_t>(row * top_k + i)];
        if (slot < 0 || slot >= kSlots) continue;
        const std::vector<double> key = pool.read_mla(slot);
        call.k.insert(call.k.end(), key.begin(), key.end());
        call.v.insert(call.v.end(), key.begin(), key.begin() + kMlaLatentDim);
        ++call.seq_len;
      }
      call.scale = scale;
      call.causal = false;
      call.sinks.assign(sinks.begin(), sinks.end());
      test::append_result(test::dense_attention(call), all);
    }
    return all;
  }

  int64_t num_rows;
  int64_t num_heads;
  test::Pool pool;
  std::vector<int32_t> written;  // slots that hold a row
  std::vector<float> q;
  std::vector<int32_t> indices;
  std::vector<int32_t> topk_lens;
  std::vector<float> sinks;
  float scale = 1.0f / 24;
  LseForm lse_form;
};

constexpr MlaRow kRowFormats[] = {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16};

TEST_CASE("random lists of every row format agree with the oracle") {
  auto engine = test::random_engine(90);
  CAPTURE(test::seed());
  for (int round = 0; round < 24; ++round) {
    const int64_t heads[] = {1, 3, 16, 65, 130};
    SparseCall call(kRowFormats[round % 4], 1 + static_cast<int64_t>(engine() % 3),
                    heads[engine() % 5], engine);
    const auto top_k = engine() % 200;
    const int32_t ignored[] = {-1, kSlots, std::numeric_limits<int32_t>::max(),
                               std::numeric_limits<int32_t>::min()};
    for (size_t i = 0; i < top_k * static_cast<size_t>(call.num_rows); ++i)
      call.indices.push_back(engine() % 3 == 0 ? ignored[engine() % 4] : call.any_written(engine));
    if (engine() % 2 == 0)
      for (int64_t row = 0; row < call.num_rows; ++row)
        call.topk_lens.push_back(static_cast<int32_t>(engine() % (top_k + 1)));
    if (engine() % 2 == 0)
      for (int64_t head = 0; head < call.num_heads; ++head)
        call.sinks.push_back(static_cast<float>(engine() % 5));
    CAPTURE(round);
    const test::DenseResult expected = call.oracle();
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      const SparseResult got = call.run();
      const test::Closeness closeness = test::compare({got.out, got.lse}, expected);
      CHECK(closeness.empty_rows_match);
      CHECK(closeness.lse <= 2e-5);
      CHECK(closeness.out <= 2e-5);
    });
  }
}

TEST_CASE("the answer does not depend on where ignored entries stand") {
  auto engine = test::random_engine(91);
  CAPTURE(test::seed());
  for (const MlaRow format : kRowFormats) {
    SparseCall call(format, 1, 4, engine);
    std::vector<int32_t> chosen;
    for (int i = 0; i < 8; ++i) chosen.push_back(call.any_written(engine));
    std::vector<int32_t> packed(64, -1), middle(64, -1), spread(64, -1), far(640, -1);
    for (size_t i = 0; i < 8; ++i) {
      packed[i] = chosen[i];
      middle[40 + i] = chosen[i];
      spread[3 + 7 * i] = chosen[i];
      far[600 + i] = chosen[i];
    }
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      call.indices = packed;
      const SparseResult expected = call.run();
      for (const auto& list : {middle, spread, far}) {
        call.indices = list;
        CHECK(call.run() == expected);
      }
      call.indices.assign(64, -1);
      const SparseResult none = call.run();
      for (const float x : none.out) REQUIRE(x == 0.0f);
      for (const float lse : none.lse) CHECK(lse == -kInfinity);
    });
  }
}

TEST_CASE("a list of none is fine, and a token named twice counts twice") {
  auto engine = test::random_engine(92);
  SparseCall call(MlaRow::kBf16, 2, 2, engine);
  SparseResult result = call.run();
  for (const float lse : result.lse) CHECK(lse == -kInfinity);
  const int32_t slot = call.written[0];
  call.indices = {slot, slot, slot, -1};
  result = call.run();
  const std::vector<double> key = call.pool.read_mla(slot);
  CHECK(result.lse[0] - result.lse[2] == doctest::Approx(0).epsilon(1e3));
  for (size_t d = 0; d < 512; ++d) {
    CHECK(result.out[d] == doctest::Approx(key[d]));
    CHECK(result.out[2 * 512 + d] == static_cast<float>(key[d]));
  }
  // Row 0 named it twice: its lse is larger by ln 2 than with the token once.
  const float twice = result.lse[0];
  call.indices = {slot, -1, slot, -1};
  CHECK(twice - call.run().lse[0] == doctest::Approx(std::log(2.0)).epsilon(1e-5));
}

TEST_CASE("sparse lse comes in every form, with and without sinks") {
  auto engine = test::random_engine(93);
  SparseCall call(MlaRow::kFp8, 2, 3, engine);
  std::fill(call.q.begin(), call.q.end(), 0.0f);
  for (int i = 0; i < 512; ++i) call.indices.push_back(i % 2 == 0 ? call.any_written(engine) : -1);
  call.topk_lens = {256, 128};
  CHECK(call.run().lse[0] == doctest::Approx(std::log(128.0)));
  CHECK(call.run().lse[3] == doctest::Approx(std::log(64.0)));
  call.lse_form.base2 = true;
  CHECK(call.run().lse[0] == doctest::Approx(7.0));
  call.lse_form.heads_first = true;
  CHECK(call.run().lse[1] == doctest::Approx(6.0));
  call.lse_form = {};
  call.lse_form.includes_sink = true;
  call.sinks = {0.0f, kInfinity, -kInfinity};
  const SparseResult result = call.run();
  CHECK(result.lse[0] == doctest::Approx(std::log(129.0)));
  CHECK(result.lse[1] == kInfinity);
  CHECK(result.lse[2] == doctest::Approx(std::log(128.0)));
  for (size_t d = 0; d < 512; ++d) CHECK(result.out[512 + d] == 0.0f);
}

TEST_CASE("dense MLA of a sequence is sparse MLA of its tokens, bit for bit") {
  auto engine = test::random_engine(94);
  for (const MlaRow format : kRowFormats) {
    test::AttendBatch batch(mla_geometry(1, 16, format), 70, {{1, 100}}, engine);
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      const test::AttendResult dense = batch.run();
      std::vector<int32_t> indices;
      for (int64_t token = 0; token < 100; ++token)
        indices.push_back(static_cast<int32_t>(batch.slot(0, token)));
      SparseResult sparse = {std::vector<float>(70 * 512, NAN), std::vector<float>(70, NAN)};
      SparseMlaParams params;
      params.layer = batch.pool().layer();
      params.q = dense_tensor(batch.q.data(), Dtype::kFp32, 1, 70, 576);
      params.output.out = dense_tensor(sparse.out.data(), Dtype::kFp32, 1, 70, 512);
      params.output.lse = sparse.lse.data();
      params.indices = indices.data();
      params.top_k = 100;
      params.scale = batch.scale;
      REQUIRE(run_sparse_mla(params).ok());
      CHECK(sparse.out == dense.out);
      CHECK(sparse.lse == dense.lse);
    });
  }
}

TEST_CASE("tokens past 2^31 bytes and 2^31 elements are addressed in 64 bits") {
  auto engine = test::random_engine(95);
  // Blocks of 64 x 576 bytes: number 58,255 begins just before 2^31 bytes, and token 3,728,271
  // just before 2^31 elements.
  constexpr int64_t kBlocks = 60000;
  LayerView layer;
  layer.geometry = mla_geometry(1, 64, MlaRow::kFp8);
  layer.page = page_layout(layer.geometry);
  layer.block_stride_bytes = layer.page.page_bytes;
  layer.num_blocks = kBlocks;
  const auto size = static_cast<size_t>(kBlocks * layer.block_stride_bytes);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  layer.base = static_cast<std::byte*>(memory);
  SparseCall source(MlaRow::kFp8, 1, 2, engine);
  const std::byte* row = source.pool.bytes().data() + source.pool.mla_offset(source.written[1]);
  std::vector<SparseResult> results;
  for (const int32_t slot : {64, 3728270, 3728271, 3728272, 60000 * 64 - 1}) {
    std::memcpy(layer.base + int64_t{slot} * 576, row, 576);
    source.indices = {slot};
    SparseResult result;
    SparseMlaParams params = source.params(result);
    params.layer = layer;
    REQUIRE(run_sparse_mla(params).ok());
    results.push_back(result);
    const int32_t one = 1, block = slot / 64;
    // The same through a block table: the block's first token.
    std::memcpy(layer.base + int64_t{block} * 64 * 576, row, 576);
    AttendParams dense;
    dense.layer = layer;
    dense.q = params.q;
    dense.output = params.output;
    dense.q_lens = dense.seq_lens = &one;
    dense.num_seqs = dense.block_table_stride = 1;
    dense.block_table = &block;
    dense.scale = params.scale;
    REQUIRE(run_attend(dense).ok());
    CHECK(result == results[0]);
  }
  for (const SparseResult& result : results) CHECK(result == results[0]);
  munmap(memory, size);
}

void check_refused(const std::string& part, const std::function<void(SparseMlaParams&)>& change) {
  auto engine = test::random_engine(96);
  SparseCall call(MlaRow::kFp8, 2, 2, engine);
  call.indices = {0, 1, 2, 3};
  SparseResult result;
  SparseMlaParams params = call.params(result);
  change(params);
  const Status status = run_sparse_mla(params);
  CAPTURE(status.to_string());
  CAPTURE(part);
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().find(part) != std::string::npos);
  for (const float x : result.out) REQUIRE(std::isnan(x));
  for (const float x : result.lse) REQUIRE(std::isnan(x));
}

TEST_CASE("sparse calls that cannot be are refused, and nothing is written") {
  check_refused("top_k is -1", [](auto& p) { p.top_k = -1; });
  check_refused("top_k is 9223372036854775807 with 2 rows",
                [](auto& p) { p.top_k = std::numeric_limits<int64_t>::max(); });
  check_refused("indices is null: 4 entries", [](auto& p) { p.indices = nullptr; });
  check_refused("indices is not aligned", [](auto& p) {
    p.indices = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.indices) + 1);
  });
  static const int32_t negative[] = {0, -1};
  check_refused("topk_lens[1] is -1: expected 0 to top_k 2",
                [](auto& p) { p.topk_lens = negative; });
  static const int32_t large[] = {3, 0};
  check_refused("topk_lens[0] is 3: expected 0 to top_k 2", [](auto& p) { p.topk_lens = large; });
  check_refused("scale is nan", [](auto& p) { p.scale = std::nanf(""); });
  check_refused("q is [2, 2, 512]: expected [rows, 2, 576]", [](auto& p) { p.q.shape[2] = 512; });
  check_refused("out is [2, 2, 576]: expected [rows, 2, 512]",
                [](auto& p) { p.output.out.shape[2] = 576; });
  check_refused("q: dtype is fp8_e4m3", [](auto& p) { p.q.dtype = Dtype::kFp8E4m3; });
  check_refused("q has 4097 heads", [](auto& p) { p.q.shape[1] = 4097; });
  check_refused("mla_row is none", [](auto& p) {
    p.layer.geometry = {1, 1, 8, 576, 512, KvFormat::kBf16, KvFormat::kBf16};
    p.layer.page = page_layout(p.layer.geometry);
    p.layer.block_stride_bytes = p.layer.page.page_bytes;
  });
}

}  // namespace
}  // namespace larder::kernels
