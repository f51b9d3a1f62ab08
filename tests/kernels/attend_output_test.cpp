// FP8 and NVFP4 outputs, byte for byte.
#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/attend_call.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/small_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Side;
using test::SmallPool;

constexpr int64_t kRows = 9;
constexpr int64_t kHeads = 3;
constexpr int64_t kDim = 32;
constexpr int64_t kColumns = kHeads * kDim / 16;  // of scales: 6, in tiles of 4

// One call over a random cache, whose output is asked for in several forms.
struct OutputCall {
  explicit OutputCall(std::mt19937_64& engine)
      : batch({1, 1, 16, kDim, kDim, KvFormat::kBf16, KvFormat::kBf16}, kHeads, {{kRows, 40}},
              engine) {
    params.layer = batch.pool().layer();
    params.q = dense_tensor(batch.q.data(), Dtype::kFp32, kRows, kHeads, kDim);
    params.q_lens = &q_len;
    params.seq_lens = &seq_len;
    params.num_seqs = 1;
    params.block_table = batch.table().data();
    params.block_table_stride = batch.table_stride();
    params.scale = batch.scale;
  }
  std::vector<float> floats() {
    std::vector<float> out(kRows * kHeads * kDim, NAN);
    params.output.out = dense_tensor(out.data(), Dtype::kFp32, kRows, kHeads, kDim);
    REQUIRE(run_attend(params).ok());
    return out;
  }

  test::AttendBatch batch;
  int32_t q_len = kRows;
  int32_t seq_len = 40;
  AttendParams params;
};

TEST_CASE("fp8 output is the nearest byte of value / out_scale, at any strides") {
  auto engine = test::random_engine(80);
  CAPTURE(test::seed());
  OutputCall call(engine);
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    const std::vector<float> expected = call.floats();
    for (const float out_scale : {1.0f, 0.001f, 37.0f}) {
      call.params.output.out_scale = out_scale;
      std::vector<uint8_t> out(2 * kRows * kHeads * kDim, 0xA5);
      // Every second byte, heads outermost.
      call.params.output.out = {
          out.data(), Dtype::kFp8E4m3, {kRows, kHeads, kDim}, {2 * kDim, 2 * kDim * kRows, 2}};
      REQUIRE(run_attend(call.params).ok());
      for (size_t row = 0; row < kRows; ++row)
        for (size_t head = 0; head < kHeads; ++head)
          for (size_t d = 0; d < kDim; ++d) {
            const float value = expected[(row * kHeads + head) * kDim + d];
            const size_t at = 2 * ((head * kRows + row) * kDim + d);
            REQUIRE(out[at] == test::nearest_e4m3(value / out_scale));
            REQUIRE(out[at + 1] == 0xA5);
          }
    }
  });
}

// The byte offset of formats.md 7.12, as it stands there.
size_t tile_offset(size_t m, size_t k, size_t columns) {
  const size_t tiles = (columns + 3) / 4;
  return ((((m >> 7) * tiles + (k >> 2)) << 9) | ((m & 31) << 4) | (((m >> 5) & 3) << 2) | (k & 3));
}

struct Nvfp4Output {
  std::vector<uint8_t> data = std::vector<uint8_t>(kRows * kHeads * kDim / 2, 0xA5);
  std::vector<uint8_t> scales;
  bool operator==(const Nvfp4Output&) const = default;
};

Nvfp4Output expected_nvfp4(const std::vector<float>& values, float sf_scale, int64_t first_row) {
  Nvfp4Output expected;
  std::fill(expected.data.begin(), expected.data.end(), uint8_t{0});
  const auto rows = static_cast<size_t>((kRows + first_row + 127) / 128 * 128);
  expected.scales.assign(rows * 8, 0xA5);
  for (size_t group = 0; group < values.size() / 16; ++group) {
    float amax = 0;
    for (size_t i = 0; i < 16; ++i) amax = std::max(amax, std::fabs(values[group * 16 + i]));
    const int byte = test::nearest_e4m3(sf_scale * amax / 6.0f);
    const auto scale = static_cast<float>(test::e4m3_value(byte));
    const size_t row = group / kColumns + static_cast<size_t>(first_row);
    expected.scales[tile_offset(row, group % kColumns, kColumns)] = static_cast<uint8_t>(byte);
    for (size_t i = 0; i < 16; ++i) {
      const int code = scale == 0 ? (std::signbit(values[group * 16 + i]) ? 8 : 0)
                                  : test::nearest_e2m1(values[group * 16 + i] * (sf_scale / scale));
      uint8_t& pair = expected.data[(group * 16 + i) / 2];
      pair = static_cast<uint8_t>(pair | code << (i % 2 * 4));
    }
  }
  return expected;
}

TEST_CASE("nvfp4 output has the bytes and the tile offsets of the definition") {
  auto engine = test::random_engine(81);
  CAPTURE(test::seed());
  OutputCall call(engine);
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    const std::vector<float> values = call.floats();
    for (const float sf_scale : {1.0f, 300.0f, 1e-4f, 1e6f})
      for (const int64_t first_row : {0, 30, 125, 250}) {  // across lane groups and tiles
        CAPTURE(sf_scale);
        CAPTURE(first_row);
        const Nvfp4Output expected = expected_nvfp4(values, sf_scale, first_row);
        Nvfp4Output got;
        got.scales.assign(expected.scales.size(), 0xA5);
        call.params.output.out =
            dense_tensor(got.data.data(), Dtype::kE2m1x2, kRows, kHeads, kDim / 2);
        call.params.output.out_sf = got.scales.data();
        call.params.output.out_sf_scale = sf_scale;
        call.params.output.out_sf_first_row = first_row;
        REQUIRE(run_attend(call.params).ok());
        CHECK(got.data == expected.data);
        CHECK(got.scales == expected.scales);
      }
  });
}

TEST_CASE("nvfp4 output of zeros, NaN and infinities has no NaN scale") {
  SmallPool small(32);
  // Group 0: 6, NaN and zeros. Group 1: an infinity and -1.
  small.set(Side::kV, 0, 0, 6.0f);
  small.set(Side::kV, 0, 1, std::nanf(""));
  small.set(Side::kV, 0, 16, std::numeric_limits<float>::infinity());
  small.set(Side::kV, 0, 17, -1.0f);
  const auto run = [&](int32_t seq_len, std::vector<uint8_t>& out, std::vector<uint8_t>& scales) {
    small.run(std::vector<float>(32, 0.0f), seq_len, 1.0f, [&](AttendParams& params) {
      params.output.out = dense_tensor(out.data(), Dtype::kE2m1x2, 1, 1, 16);
      params.output.out_sf = scales.data();
    });
  };
  std::vector<uint8_t> out(16, 0xA5), scales(512, 0xA5);
  run(1, out, scales);
  CHECK(scales[0] == 0x38);  // 1
  CHECK(scales[1] == 0x7E);  // 448
  CHECK((out[0] & 15) == 7);
  CHECK((out[0] >> 4 & 7) == 0);
  for (size_t i = 1; i < 8; ++i) CHECK(out[i] == 0);
  CHECK(out[8] == 0x87);  // 6, and -1 / 448 as a zero with its sign
  run(0, out, scales);
  CHECK(scales[0] == 0);
  CHECK(scales[1] == 0);
  for (const uint8_t pair : out) CHECK(pair == 0);
  for (size_t i = 2; i < 512; ++i) REQUIRE(scales[i] == 0xA5);
}

TEST_CASE("fp8 output saturates infinities and keeps a NaN") {
  SmallPool small(16);
  small.set(Side::kV, 0, 0, 1e30f);
  small.set(Side::kV, 0, 1, -std::numeric_limits<float>::infinity());
  small.set(Side::kV, 0, 2, std::nanf(""));
  std::vector<uint8_t> out(16, 0xA5);
  small.run(std::vector<float>(16, 0.0f), 1, 1.0f, [&](AttendParams& params) {
    params.output.out = dense_tensor(out.data(), Dtype::kFp8E4m3, 1, 1, 16);
  });
  CHECK(out[0] == 0x7E);
  CHECK(out[1] == 0xFE);
  CHECK(out[2] == 0x7F);
  for (size_t i = 3; i < 16; ++i) CHECK(out[i] == 0);
}

TEST_CASE("the stride of an axis of size 1 is never used") {
  SmallPool small(16);
  small.set(Side::kV, 0, 0, 2.0f);
  for (const int64_t stride : {int64_t{7}, int64_t{0}, int64_t{1} << 40, int64_t{-1}})
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kFp8E4m3}) {
      std::vector<uint8_t> out(64, 0xA5);
      small.run(std::vector<float>(16, 0.0f), 1, 1.0f, [&](AttendParams& params) {
        params.q.strides = {stride, stride, 1};
        params.output.out = {out.data(), dtype, {1, 1, 16}, {stride, stride, 1}};
      });
      if (dtype == Dtype::kFp32)
        CHECK(*reinterpret_cast<const float*>(out.data()) == 2.0f);
      else
        CHECK(out[0] == 0x40);
    }
}

}  // namespace
}  // namespace larder::kernels
