// Key transforms: the rotation against its matrix in double, and keys through append and gather.
#include <bit>
#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/cpu/rotate.h"
#include "kernels/kernel_table.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/dense_attention.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Pool;
using test::Side;

TEST_CASE("the stretch that is rotated is the largest power of two that divides the dim") {
  CHECK(rotation_dim(64) == 64);
  CHECK(rotation_dim(256) == 256);
  CHECK(rotation_dim(96) == 32);
  CHECK(rotation_dim(80) == 16);
  CHECK(rotation_dim(576) == 64);
  CHECK(rotation_dim(1024) == 1024);
}

// Row i of the orthonormal Hadamard matrix in natural order, times the stretch that i lies in.
double rotated_element(const std::vector<float>& values, int64_t i, int64_t n) {
  double sum = 0;
  for (int64_t j = i / n * n; j < i / n * n + n; ++j)
    sum += std::popcount(static_cast<uint64_t>((i % n) & (j % n))) % 2 == 0
               ? values[static_cast<size_t>(j)]
               : -values[static_cast<size_t>(j)];
  return sum / std::sqrt(static_cast<double>(n));
}

TEST_CASE("the rotation is the Sylvester matrix, and its own inverse") {
  auto engine = test::random_engine(50);
  CAPTURE(test::seed());
  for (const int64_t dim : {16, 32, 48, 64, 80, 96, 128, 192, 256, 576, 1024}) {
    CAPTURE(dim);
    const std::vector<float> values = test::normal_values(engine, dim);
    std::vector<float> rotated = values;
    rotate_row_ref(rotated.data(), dim);
    for (int64_t i = 0; i < dim; ++i)
      REQUIRE(std::fabs(rotated[static_cast<size_t>(i)] -
                        rotated_element(values, i, rotation_dim(static_cast<int32_t>(dim)))) <
              3e-6);
    rotate_row_ref(rotated.data(), dim);
    for (size_t i = 0; i < values.size(); ++i) REQUIRE(std::fabs(rotated[i] - values[i]) < 3e-6);
  }
}

TEST_CASE("the factor of the rotation is correctly rounded") {
  for (int32_t n = 1; n <= 1024; n *= 2)
    CHECK(rotation_factor(n) == static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))));
}

TEST_CASE("transformed keys lie in the pool as float64 has them, and come back as they went in") {
  auto engine = test::random_engine(51);
  CAPTURE(test::seed());
  const AttentionGeometry geometry = {1, 2, 4, 96, 32, KvFormat::kFp16, KvFormat::kBf16};
  const std::vector<float> offset = test::normal_values(engine, 2 * 96);
  std::vector<float> k = test::normal_values(engine, 8 * 2 * 96);
  std::vector<float> v = test::normal_values(engine, 8 * 2 * 32);
  for (size_t t = 0; t < kKeyTransformNames.size(); ++t)
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      const auto transform = static_cast<KeyTransform>(t);
      CAPTURE(name(transform));
      Pool pool(geometry, 2);
      pool.layer().key_transform = transform;
      pool.layer().key_offset = offset.data();
      const auto slots = test::consecutive_slots(0, 8);
      REQUIRE(test::append(pool, k, v, slots).ok());
      for (int64_t row = 0; row < 16; ++row) {
        std::vector<float> key(k.begin() + row * 96, k.begin() + row * 96 + 96);
        if (is_centred(transform))
          for (size_t i = 0; i < 96; ++i) key[i] -= offset[static_cast<size_t>(row % 2) * 96 + i];
        const auto read = pool.read(Side::kK, row / 2, row % 2);
        for (int64_t i = 0; i < 96; ++i) {
          const double expected =
              is_rotated(transform) ? rotated_element(key, i, 32) : key[static_cast<size_t>(i)];
          REQUIRE(std::fabs(read[static_cast<size_t>(i)] - expected) <
                  std::fabs(expected) / 2000 + 1e-5);
        }
      }
      std::vector<float> out(k.size(), NAN);
      GatherParams params;
      params.layer = pool.layer();
      params.k_out = dense_tensor(out.data(), Dtype::kFp32, 8, 2, 96);
      params.slots = slots.data();
      params.num_slots = 8;
      REQUIRE(run_gather(params).ok());
      for (size_t i = 0; i < k.size(); ++i) REQUIRE(std::fabs(out[i] - k[i]) < 5e-3);
    });
}

TEST_CASE("values are never transformed, and an offset counts only where keys are centred") {
  auto engine = test::random_engine(52);
  const AttentionGeometry geometry = {1, 1, 4, 32, 32, KvFormat::kNvfp4, KvFormat::kNvfp4};
  std::vector<float> k = test::normal_values(engine, 4 * 32);
  const std::vector<float> offset(32, 100.0f);
  Pool plain(geometry, 1);
  REQUIRE(test::append(plain, k, k, test::consecutive_slots(0, 4)).ok());
  Pool ignored(geometry, 1);
  ignored.layer().key_offset = offset.data();
  REQUIRE(test::append(ignored, k, k, test::consecutive_slots(0, 4)).ok());
  CHECK(ignored.bytes() == plain.bytes());
  Pool centred(geometry, 1);
  centred.layer().key_offset = offset.data();
  centred.layer().key_transform = KeyTransform::kCentredRotated;
  REQUIRE(test::append(centred, k, k, test::consecutive_slots(0, 4)).ok());
  const auto v_begin = plain.layer().page.v_data_offset_bytes;
  CHECK(std::equal(plain.bytes().begin() + v_begin, plain.bytes().end(),
                   centred.bytes().begin() + v_begin));
  CHECK(centred.read(Side::kK, 0, 0) != plain.read(Side::kK, 0, 0));
}

TEST_CASE("rotation and centring lower the error of keys with outliers and a mean") {
  auto engine = test::random_engine(53);
  CAPTURE(test::seed());
  std::vector<float> k = test::normal_values(engine, 64 * 128);
  std::vector<float> offset(128, 0.0f);
  for (size_t i = 0; i < 128; i += 16) offset[i] = 12.0f;
  for (size_t i = 0; i < k.size(); ++i) k[i] += offset[i % 128];
  double errors[2];
  for (int i = 0; i < 2; ++i) {
    Pool pool({1, 1, 64, 128, 128, KvFormat::kNvfp4, KvFormat::kNvfp4}, 1);
    pool.layer().key_offset = offset.data();
    pool.layer().key_transform = i == 0 ? KeyTransform::kNone : KeyTransform::kCentredRotated;
    const auto slots = test::consecutive_slots(0, 64);
    REQUIRE(test::append(pool, k, k, slots).ok());
    std::vector<float> out(k.size(), NAN);
    GatherParams params;
    params.layer = pool.layer();
    params.k_out = dense_tensor(out.data(), Dtype::kFp32, 64, 1, 128);
    params.slots = slots.data();
    params.num_slots = 64;
    REQUIRE(run_gather(params).ok());
    errors[i] = test::relative_l2(std::vector<double>(out.begin(), out.end()),
                                  std::vector<double>(k.begin(), k.end()));
  }
  CHECK(errors[1] < 0.5 * errors[0]);
}

}  // namespace
}  // namespace larder::kernels
