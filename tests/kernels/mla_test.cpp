// MLA rows: the golden bytes, and every row format against its definition on every vector target.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/cpu/mla_rows.h"
#include "kernels/kernel_table.h"
#include "tests/kernels/goldens.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Pool;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr MlaRow kRows[] = {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16};

std::string row_hex(Pool& pool, int64_t slot) {
  return test::hex(pool.bytes().data() + pool.mla_offset(slot),
                   static_cast<size_t>(mla_row_bytes(pool.geometry().mla_row)));
}

Status gather(const Pool& pool, void* out, Dtype dtype, const std::vector<int64_t>& slots) {
  const auto rows = static_cast<int64_t>(slots.size());
  GatherParams params;
  params.layer = pool.layer();
  params.k_out = dense_tensor(out, dtype, rows, 1, 576);
  params.slots = slots.data();
  params.num_slots = rows;
  return run_gather(params);
}

TEST_CASE("the golden rows and their FP8 staging are reproduced byte for byte") {
  const nlohmann::json data = test::goldens();
  test::Lcg lcg{352};
  std::vector<float> latent = lcg.values(512, 1.5);
  std::vector<float> rope = lcg.values(64, 8.0);
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    Pool fp8(mla_geometry(1, 4, MlaRow::kFp8Ds), 1);
    REQUIRE(test::append(fp8, latent, rope, {2}).ok());
    CHECK(row_hex(fp8, 2) == data["fp8_ds_mla"]["row"]);

    Pool pool(mla_geometry(1, 4, MlaRow::kNvfp4Ds), 1);
    pool.layer().k_scale = 0.5f;  // not used when rows are written
    REQUIRE(test::append(pool, latent, rope, {1}).ok());
    CHECK(row_hex(pool, 1) == data["ds_mla"]["row"]);
    std::vector<std::byte> staged(576, std::byte{0xFF});
    REQUIRE(gather(pool, staged.data(), Dtype::kFp8E4m3, {1}).ok());
    CHECK(test::hex(staged.data(), 576) == data["ds_mla"]["fp8_stage_k0.5"]);
    pool.layer().k_scale = 1.0f;
    REQUIRE(gather(pool, staged.data(), Dtype::kFp8E4m3, {1}).ok());
    CHECK(test::hex(staged.data(), 576) == data["ds_mla"]["fp8_stage_k1"]);
  });
}

// What formats.md 5 and kv_format.h say of one row, in plain steps.
std::vector<std::byte> expected_row(MlaRow format, const float* latent, const float* rope,
                                    float k_scale) {
  std::vector<std::byte> row(static_cast<size_t>(mla_row_bytes(format)));
  const auto e4m3 = [](float x) {
    return static_cast<std::byte>(std::isnan(x) ? 0x7F : test::nearest_e4m3(x));
  };
  const auto put_bf16 = [&](size_t at, float x) {
    const uint16_t bits = std::isnan(x) ? static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16)
                                        : test::nearest_bf16(x);
    std::memcpy(row.data() + at, &bits, 2);
  };
  const auto largest = [&](size_t first, size_t count) {
    float amax = 0;
    for (size_t i = first; i < first + count; ++i)
      if (std::fabs(latent[i]) > amax) amax = std::fabs(latent[i]);
    return amax;
  };
  if (format == MlaRow::kNvfp4Ds) {
    for (size_t group = 0; group < 32; ++group) {
      const float wanted = std::max(largest(16 * group, 16) / 6.0f, 0x1p-9f);
      int byte = 1;
      while (byte < 0x7E && test::e4m3_value(byte) < wanted) ++byte;
      row[320 + 8 * (group % 4) + group / 4] = static_cast<std::byte>(byte);
      const float inverse = 1.0f / static_cast<float>(test::e4m3_value(byte));
      for (size_t i = 0; i < 16; ++i) {
        const float x = latent[16 * group + i];
        const int code = test::nearest_e2m1(std::isnan(x) ? x : x * inverse);
        row[8 * group + i / 2] |= static_cast<std::byte>(code << (i % 2 * 4));
      }
    }
    for (size_t i = 0; i < 64; ++i) row[256 + i] = e4m3(rope[i]);
    return row;
  }
  for (size_t i = 0; i < 576; ++i) {
    const float x = i < 512 ? latent[i] : rope[i - 512];
    if (format == MlaRow::kBf16) put_bf16(2 * i, x);
    if (format == MlaRow::kFp8) row[i] = e4m3(x / k_scale);
    if (format == MlaRow::kFp8Ds && i >= 512) put_bf16(528 + 2 * (i - 512), x);
    if (format == MlaRow::kFp8Ds && i < 512) {
      const float amax = std::min(largest(i / 128 * 128, 128), std::numeric_limits<float>::max());
      const float scale = std::max(amax / 448.0f, std::numeric_limits<float>::min());
      std::memcpy(row.data() + 512 + 4 * (i / 128), &scale, 4);
      row[i] = e4m3(x / scale);
    }
  }
  return row;
}

TEST_CASE("every row format is written as its definition says, on every target") {
  auto engine = test::random_engine(60);
  CAPTURE(test::seed());
  const float specials[] = {kNan, -kNan, kInfinity, -kInfinity, -0.0f, 1e-40f, 1e38f, 1e-3f};
  for (int round = 0; round < 40; ++round) {
    const float amplitude = std::exp2(static_cast<float>(static_cast<int>(engine() % 30) - 20));
    std::vector<float> latent = test::normal_values(engine, 3 * 512, amplitude);
    std::vector<float> rope = test::normal_values(engine, 3 * 64, amplitude);
    if (round % 2 == 0)
      for (int i = 0; i < 12; ++i) {
        latent[engine() % latent.size()] = specials[engine() % 8];
        rope[engine() % rope.size()] = specials[engine() % 8];
      }
    const std::vector<int64_t> slots = {6, -1, 2};
    for (const MlaRow format : kRows)
      test::on_every_target([&](const std::string& target) {
        CAPTURE(target);
        CAPTURE(name(format));
        Pool pool(mla_geometry(1, 4, format), 2, std::byte{0xA5}, 13);
        pool.layer().k_scale = 0.3f;
        std::vector<std::byte> expected = pool.bytes();
        for (const size_t i : {size_t{0}, size_t{2}}) {
          const auto row =
              expected_row(format, latent.data() + i * 512, rope.data() + i * 64, 0.3f);
          std::copy(row.begin(), row.end(), expected.begin() + pool.mla_offset(slots[i]));
        }
        REQUIRE(test::append(pool, latent, rope, slots).ok());
        REQUIRE(pool.bytes() == expected);
      });
  }
}

TEST_CASE("every row comes back as its value, whatever its bytes, and as the FP8 staging of it") {
  auto engine = test::random_engine(61);
  CAPTURE(test::seed());
  for (const MlaRow format : kRows)
    for (const float k_scale : {1.0f, 0.3f}) {
      Pool pool(mla_geometry(1, 4, format), 1);
      pool.layer().k_scale = k_scale;
      for (std::byte& byte : pool.bytes()) byte = static_cast<std::byte>(engine() & 0x7E);
      test::on_every_target([&](const std::string& target) {
        CAPTURE(target);
        CAPTURE(name(format));
        std::vector<float> out(3 * 576, kNan);
        std::vector<std::byte> staged(3 * 576, std::byte{0xFF});
        REQUIRE(gather(pool, out.data(), Dtype::kFp32, {3, -5, 0}).ok());
        REQUIRE(gather(pool, staged.data(), Dtype::kFp8E4m3, {3, -5, 0}).ok());
        for (size_t i = 576; i < 2 * 576; ++i) {
          REQUIRE(std::isnan(out[i]));
          REQUIRE(staged[i] == std::byte{0xFF});
        }
        const auto expected = pool.read_mla(3);
        for (size_t i = 0; i < 576; ++i) {
          REQUIRE(out[i] == static_cast<float>(expected[i]));
          const float ratio = static_cast<float>(expected[i]) * (1.0f / k_scale);
          REQUIRE(
              std::to_integer<int>(staged[i]) ==
              (format == MlaRow::kFp8
                   ? std::to_integer<int>(pool.bytes()[static_cast<size_t>(pool.mla_offset(3)) + i])
                   : test::nearest_e4m3(ratio)));
        }
      });
    }
}

TEST_CASE("bf16 rows keep their bits on the way in and out, and any strides will do") {
  std::vector<uint16_t> bits(2 * 2 * 576);
  auto engine = test::random_engine(62);
  for (uint16_t& x : bits) x = static_cast<uint16_t>(engine());
  Pool pool(mla_geometry(1, 2, MlaRow::kBf16), 1);
  const int64_t slots[] = {1, 0};
  AppendParams append;
  append.layer = pool.layer();
  append.k = {bits.data(), Dtype::kBf16, {2, 1, 512}, {2 * 576, 99, 2}};
  append.v = {bits.data() + 2 * 512, Dtype::kBf16, {2, 1, 64}, {2 * 576, -7, 2}};
  append.slots = slots;
  append.num_slots = 2;
  REQUIRE(run_append(append).ok());
  std::vector<uint16_t> out(2 * 576);
  REQUIRE(gather(pool, out.data(), Dtype::kBf16, {1, 0}).ok());
  for (size_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == bits[2 * i]);
}

TEST_CASE("an infinity in an fp8_ds_mla tile counts as the largest float: the tile stays finite") {
  std::vector<float> latent(512, 1.0f);
  std::vector<float> rope(64, 0.0f);
  latent[5] = -kInfinity;
  Pool pool(mla_geometry(1, 1, MlaRow::kFp8Ds), 1);
  REQUIRE(test::append(pool, latent, rope, {0}).ok());
  const auto values = pool.read_mla(0);
  CHECK(values[5] == -static_cast<double>(std::numeric_limits<float>::max()));
  for (const double x : values) CHECK(std::isfinite(x));
  CHECK(values[200] == doctest::Approx(1.0));
}

TEST_CASE("MLA calls are refused by the field that does not fit") {
  Pool pool(mla_geometry(1, 4, MlaRow::kNvfp4Ds), 1, std::byte{0xA5});
  std::vector<float> values(576);
  const int64_t slot = 0;
  const auto check = [](const Status& status, std::string_view part) {
    CAPTURE(status.to_string());
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(status.message().find(part) != std::string::npos);
  };
  AppendParams append;
  append.layer = pool.layer();
  append.k = dense_tensor(values.data(), Dtype::kFp32, 1, 1, 576);
  append.v = dense_tensor(values.data(), Dtype::kFp32, 1, 1, 64);
  append.slots = &slot;
  append.num_slots = 1;
  check(run_append(append), "k is [1, 1, 576]: expected [rows, 1, 512]");
  GatherParams params;
  params.layer = pool.layer();
  params.k_out = dense_tensor(values.data(), Dtype::kFp32, 1, 1, 576);
  params.v_out = dense_tensor(values.data(), Dtype::kFp32, 1, 1, 512);
  params.slots = &slot;
  params.num_slots = 1;
  check(run_gather(params), "v_out has 1 rows");
  params.v_out = {};
  params.k_out.dtype = Dtype::kE2m1x2;
  check(run_gather(params), "k_out: dtype is e2m1x2: expected bf16, fp16 or fp32, or fp8_e4m3");
  for (const std::byte byte : pool.bytes()) REQUIRE(byte == std::byte{0xA5});
}

}  // namespace
}  // namespace larder::kernels
