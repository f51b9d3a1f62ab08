// gather: the values that it writes, and the bytes that it leaves alone, on every vector target.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Pool;
using test::Side;

constexpr auto kPoison = std::byte{0xFF};

// Bits of the value that a reader in double expects, rounded to the dtype; 0x7FC0 and the like
// stand for every NaN.
uint32_t expected_bits(double value, Dtype dtype) {
  const auto single = static_cast<float>(value);
  if (dtype == Dtype::kFp32) return std::bit_cast<uint32_t>(single);
  if (dtype == Dtype::kFp16) return test::nearest_fp16(single);
  return test::nearest_bf16(single);
}

uint32_t bits_at(const std::vector<std::byte>& bytes, int64_t index, Dtype dtype) {
  uint32_t bits = 0;
  const auto size = static_cast<size_t>(dtype_bytes(dtype));
  std::memcpy(&bits, bytes.data() + index * static_cast<int64_t>(size), size);
  return bits;
}

// Any bytes are a pool; those whose value is not finite are left out, as NaN has many forms.
void fill_with_random_rows(Pool& pool, std::mt19937_64& engine) {
  const AttentionGeometry& g = pool.geometry();
  for (std::byte& byte : pool.bytes()) byte = static_cast<std::byte>(engine() & 0xFF);
  for (int64_t slot = 0; slot < pool.layer().num_blocks * g.block_tokens; ++slot)
    for (int64_t head = 0; head < g.num_kv_heads; ++head)
      for (const Side side : {Side::kK, Side::kV}) {
        const KvFormat format = side == Side::kK ? g.k_format : g.v_format;
        const auto data = static_cast<size_t>(pool.data_offset(side, slot, head));
        const auto scales = static_cast<size_t>(pool.scale_offset(side, slot, head));
        const auto data_bytes = static_cast<size_t>(row_data_bytes(format, pool.dim(side)));
        const auto scale_bytes = static_cast<size_t>(row_scale_bytes(format, pool.dim(side)));
        const auto clear = [&](size_t at, int bit) { pool.bytes()[at] &= ~(std::byte{1} << bit); };
        for (size_t i = 0; i < scale_bytes; ++i) clear(scales + i, 0);
        if (format == KvFormat::kFp8E4m3)
          for (size_t i = 0; i < data_bytes; ++i) clear(data + i, 0);
        if (format == KvFormat::kFp8E5m2)
          for (size_t i = 0; i < data_bytes; ++i) clear(data + i, 2);
        if (format == KvFormat::kFp16)
          for (size_t i = 1; i < data_bytes; i += 2) clear(data + i, 2);
        if (format == KvFormat::kBf16)
          for (size_t i = 1; i < data_bytes; i += 2) clear(data + i, 0);
      }
}

TEST_CASE("every format comes back as its value, in every dtype, on every target") {
  auto engine = test::random_engine(30);
  CAPTURE(test::seed());
  for (size_t k_format = 0; k_format < kKvFormatNames.size(); ++k_format)
    for (size_t v_format = 0; v_format < kKvFormatNames.size(); ++v_format) {
      const AttentionGeometry geometry = {
          1, 3, 5, 80, 48, static_cast<KvFormat>(k_format), static_cast<KvFormat>(v_format)};
      Pool pool(geometry, 4, std::byte{0xFF}, 3);
      pool.layer().k_scale = 0.37f;
      pool.layer().v_scale = 5.0f;
      fill_with_random_rows(pool, engine);
      const std::vector<int64_t> slots = {19, 0, -1, 7, 3};
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32})
        test::on_every_target([&](const std::string& target) {
          CAPTURE(target);
          CAPTURE(name(geometry.k_format));
          CAPTURE(name(geometry.v_format));
          CAPTURE(name(dtype));
          const auto size = static_cast<size_t>(dtype_bytes(dtype));
          std::vector<std::byte> k(5 * 3 * 80 * size, kPoison);
          std::vector<std::byte> v(5 * 3 * 48 * size, kPoison);
          GatherParams params;
          params.layer = pool.layer();
          params.k_out = dense_tensor(k.data(), dtype, 5, 3, 80);
          params.v_out = dense_tensor(v.data(), dtype, 5, 3, 48);
          params.slots = slots.data();
          params.num_slots = 5;
          REQUIRE(run_gather(params).ok());
          for (const Side side : {Side::kK, Side::kV})
            for (int64_t row = 0; row < 5; ++row)
              for (int64_t head = 0; head < 3; ++head) {
                const std::vector<std::byte>& out = side == Side::kK ? k : v;
                const int64_t dim = pool.dim(side);
                const int64_t first = (row * 3 + head) * dim;
                if (slots[static_cast<size_t>(row)] < 0) {
                  for (int64_t i = 0; i < dim; ++i)
                    REQUIRE(bits_at(out, first + i, dtype) ==
                            (dtype == Dtype::kFp32 ? 0xFFFFFFFF : 0xFFFF));
                  continue;
                }
                const auto expected = pool.read(side, slots[static_cast<size_t>(row)], head);
                for (int64_t i = 0; i < dim; ++i) {
                  CAPTURE(expected[static_cast<size_t>(i)]);
                  REQUIRE(bits_at(out, first + i, dtype) ==
                          expected_bits(expected[static_cast<size_t>(i)], dtype));
                }
              }
        });
    }
}

// Three sequences of 5, 0 and 9 tokens over blocks of 4, the rest of the pool NaN.
struct TableCall {
  TableCall() : pool({1, 2, 4, 32, 16, KvFormat::kNvfp4, KvFormat::kFp8E4m3}, 7, kPoison) {
    auto engine = test::random_engine(31);
    k_in = test::normal_values(engine, 14 * 2 * 32);
    v_in = test::normal_values(engine, 14 * 2 * 16);
    REQUIRE(
        test::append(pool, k_in, v_in, {20, 21, 22, 23, 4, 0, 1, 2, 3, 24, 25, 26, 27, 8}).ok());
    params.layer = pool.layer();
    params.block_table = table;
    params.seq_lens = seq_lens;
    params.num_seqs = 3;
    params.block_table_stride = 3;
  }
  Pool pool;
  std::vector<float> k_in, v_in;
  int32_t table[9] = {5, 1, -1, -7, 99, 99, 0, 6, 2};
  int32_t seq_lens[3] = {5, 0, 9};
  const int64_t slots[14] = {20, 21, 22, 23, 4, 0, 1, 2, 3, 24, 25, 26, 27, 8};
  GatherParams params;
};

void check_rows(const TableCall& call, Side side, const float* out, const std::vector<int>& rows) {
  const int64_t dim = call.pool.dim(side);
  for (size_t row = 0; row < rows.size(); ++row)
    for (int64_t head = 0; head < 2; ++head) {
      std::vector<double> expected(static_cast<size_t>(dim), NAN);
      if (rows[row] >= 0)
        expected = call.pool.read(side, call.slots[static_cast<size_t>(rows[row])], head);
      for (int64_t i = 0; i < dim; ++i) {
        const float x = out[(static_cast<int64_t>(row) * 2 + head) * dim + i];
        const auto wanted = static_cast<float>(expected[static_cast<size_t>(i)]);
        REQUIRE((std::isnan(wanted) ? std::isnan(x) : x == wanted));
      }
    }
}

TEST_CASE("a block table is gathered into rows one after another") {
  TableCall call;
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    std::vector<float> k(16 * 2 * 32, NAN), v(16 * 2 * 16, NAN);
    call.params.k_out = dense_tensor(k.data(), Dtype::kFp32, 16, 2, 32);
    call.params.v_out = dense_tensor(v.data(), Dtype::kFp32, 16, 2, 16);
    REQUIRE(run_gather(call.params).ok());
    const std::vector<int> rows = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, -1, -1};
    check_rows(call, Side::kK, k.data(), rows);
    check_rows(call, Side::kV, v.data(), rows);
  });
}

TEST_CASE("rows_per_sequence leaves room, whose rows keep their bytes; one side alone will do") {
  TableCall call;
  call.params.rows_per_sequence = 11;
  std::vector<int> rows(31, -1);
  for (int i = 0; i < 5; ++i) rows[static_cast<size_t>(i)] = i;
  for (int i = 0; i < 9; ++i) rows[static_cast<size_t>(22 + i)] = 5 + i;
  std::vector<float> k(31 * 2 * 32, NAN), v(31 * 2 * 16, NAN);
  call.params.k_out = dense_tensor(k.data(), Dtype::kFp32, 31, 2, 32);
  REQUIRE(run_gather(call.params).ok());
  check_rows(call, Side::kK, k.data(), rows);
  call.params.k_out = {};
  call.params.v_out = dense_tensor(v.data(), Dtype::kFp32, 31, 2, 16);
  REQUIRE(run_gather(call.params).ok());
  check_rows(call, Side::kV, v.data(), rows);
  call.params.v_out = {};
  CHECK(run_gather(call.params).ok());
}

TEST_CASE("any strides of the output give the values of a dense one") {
  TableCall call;
  std::vector<float> dense(14 * 2 * 32, NAN);
  call.params.k_out = dense_tensor(dense.data(), Dtype::kFp32, 14, 2, 32);
  REQUIRE(run_gather(call.params).ok());
  const std::array<int64_t, 3> layouts[] = {
      {128, 64, 2}, {32, 14 * 32, 1}, {1, 14, 28}, {-64, 32, 1}};
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32})
    for (const auto& strides : layouts) {
      CAPTURE(name(dtype));
      const std::vector<std::byte> expected = test::to_dtype(dense, dtype);
      const auto size = static_cast<size_t>(dtype_bytes(dtype));
      std::vector<std::byte> out(14 * 128 * size, kPoison);
      const int64_t origin = strides[0] < 0 ? 13 * 64 : 0;
      call.params.k_out = {
          out.data() + origin * static_cast<int64_t>(size), dtype, {14, 2, 32}, strides};
      REQUIRE(run_gather(call.params).ok());
      size_t written = 0;
      for (int64_t row = 0; row < 14; ++row)
        for (int64_t head = 0; head < 2; ++head)
          for (int64_t i = 0; i < 32; ++i) {
            const int64_t at = origin + row * strides[0] + head * strides[1] + i * strides[2];
            REQUIRE(std::memcmp(
                        out.data() + at * static_cast<int64_t>(size),
                        expected.data() + ((row * 2 + head) * 32 + i) * static_cast<int64_t>(size),
                        size) == 0);
            ++written;
          }
      const auto poisoned = static_cast<size_t>(std::count(out.begin(), out.end(), kPoison));
      CHECK(poisoned >= out.size() - written * size);
    }
}

TEST_CASE("16-bit rows come back bit for bit in their own dtype, NaN payloads too") {
  auto engine = test::random_engine(32);
  for (const bool is_bf16 : {true, false}) {
    const KvFormat format = is_bf16 ? KvFormat::kBf16 : KvFormat::kFp16;
    Pool pool({1, 1, 2, 33, 33, format, format}, 1);
    pool.layer().k_scale = 3.0f;
    for (std::byte& byte : pool.bytes()) byte = static_cast<std::byte>(engine());
    std::vector<std::byte> out(2 * 33 * 2);
    const int64_t slots[] = {0, 1};
    GatherParams params;
    params.layer = pool.layer();
    params.k_out = dense_tensor(out.data(), is_bf16 ? Dtype::kBf16 : Dtype::kFp16, 2, 1, 33);
    params.slots = slots;
    params.num_slots = 2;
    REQUIRE(run_gather(params).ok());
    CHECK(std::equal(out.begin(), out.end(), pool.bytes().begin()));
  }
}

TEST_CASE("whatever bytes a pool holds, every target gives the same bits") {
  auto engine = test::random_engine(33);
  CAPTURE(test::seed());
  for (int round = 0; round < 60; ++round) {
    const auto k_format = static_cast<KvFormat>(engine() % kKvFormatNames.size());
    const auto dim = static_cast<int32_t>(16 * (1 + engine() % 12));
    const AttentionGeometry geometry = {1, 2, 3, dim, 16, k_format, KvFormat::kBf16};
    Pool pool(geometry, 2);
    for (std::byte& byte : pool.bytes()) byte = static_cast<std::byte>(engine());
    const std::vector<float> offset = test::normal_values(engine, int64_t{2} * dim);
    pool.layer().k_scale = 0.77f;
    pool.layer().key_offset = offset.data();
    pool.layer().key_transform = static_cast<KeyTransform>(round % 4);
    const int64_t slots[] = {5, 2};
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
      std::vector<std::byte> first;
      test::on_every_target([&](const std::string& target) {
        CAPTURE(target);
        CAPTURE(name(k_format));
        CAPTURE(name(dtype));
        std::vector<std::byte> out(static_cast<size_t>(2 * 2 * dim * dtype_bytes(dtype)));
        GatherParams params;
        params.layer = pool.layer();
        params.k_out = dense_tensor(out.data(), dtype, 2, 2, dim);
        params.slots = slots;
        params.num_slots = 2;
        REQUIRE(run_gather(params).ok());
        if (first.empty()) first = out;
        REQUIRE(out == first);
      });
    }
  }
}

}  // namespace
}  // namespace larder::kernels
