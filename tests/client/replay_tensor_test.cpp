// Tensors of replay files: what the generators draw, how values are rounded, and where elements
// lie.
//
// The drawn numbers were computed with the Lcg of nvfp4_ref.py, which defines them.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "client/ctl/replay/tensor_spec.h"

namespace larder::replay {
namespace {

TensorSpec parse(const std::string& text, size_t rank = 3) {
  const json value = json::parse(text);
  Problem problem;
  TensorSpec spec = parse_tensor(Cursor(value, "k", problem), rank);
  REQUIRE_MESSAGE(!problem.found(), problem.text());
  return spec;
}

std::string refusal(const std::string& text) {
  const json value = json::parse(text);
  Problem problem;
  (void)parse_tensor(Cursor(value, "k", problem));
  return problem.text();
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

TEST_CASE("uniform and normal draws are those of the reference") {
  CHECK(
      bits_of(elements_of(parse(
          R"({"shape": [2,1,2], "dtype": "fp32", "uniform": {"seed": 7, "low": -1, "high": 3}})"))) ==
      std::vector<uint32_t>{3174551744, 1076484785, 1069127808, 1076711080});
  CHECK(bits_of(elements_of(
            parse(R"({"shape": [1,1,4], "uniform": {"seed": 7, "low": -1, "high": 3}})"))) ==
        std::vector<uint32_t>{48440u << 16, 16426u << 16, 16314u << 16, 16429u << 16});
  CHECK(bits_of(elements_of(parse(R"({"shape": [1,2,3], "normal": {"seed": 1, "std": 1}})"))) ==
        std::vector<uint32_t>{0xbf480000, 0xbf400000, 0xbe9c0000, 0xbec00000, 0x3ea70000,
                              0x3fab0000});
  CHECK(bits_of(elements_of(
            parse(R"({"shape": [4,1,1], "dtype": "fp32", "normal": {"seed": 1, "std": 0.5}})"))) ==
        std::vector<uint32_t>{0xbec7b242, 0xbec00730, 0xbe1c3778, 0xbe406f74});
  CHECK(bits_of(elements_of(parse(
            R"({"shape": [1,1,2], "dtype": "fp32",
                "uniform": {"seed": 4294967295, "low": 0, "high": 1}})"))) ==
        std::vector<uint32_t>{0x3e715634, 0x3e405f30});
}

TEST_CASE("values are rounded to the dtype, to nearest even") {
  // bf16 has 8 bits: between 256 and 512 its step is 2.
  CHECK(elements_of(parse(R"({"shape": [1,1,4], "values": [257, 259, 0.1, 1e300]})")) ==
        std::vector<float>{256, 260, 0.10009765625f, std::numeric_limits<float>::infinity()});
  CHECK(elements_of(parse(R"({"shape": [1,1,3], "dtype": "fp16", "values": [2049, 2051, 1e6]})")) ==
        std::vector<float>{2048, 2052, std::numeric_limits<float>::infinity()});
  const std::vector<float> special =
      elements_of(parse(R"({"shape": [1,1,3], "values": ["NaN", "inf", "-inf"]})"));
  CHECK(std::isnan(special[0]));
  CHECK(special[1] == std::numeric_limits<float>::infinity());
  CHECK(special[2] == -std::numeric_limits<float>::infinity());
  // The largest float32 stays; what is nearer to 2^128 does not.
  CHECK(
      elements_of(parse(
          R"({"shape": [1,1,2], "dtype": "fp32", "values": [3.4028234663852886e38, -3.5e38]})")) ==
      std::vector<float>{std::numeric_limits<float>::max(),
                         -std::numeric_limits<float>::infinity()});
}

TEST_CASE("one value per token or per dim, and single elements set afterwards") {
  CHECK(elements_of(parse(R"({"shape": [2,2,1], "per_token": [1, 2]})")) ==
        std::vector<float>{1, 1, 2, 2});
  CHECK(elements_of(parse(R"({"shape": [2,1,2], "per_dim": [1, 2]})")) ==
        std::vector<float>{1, 2, 1, 2});
  CHECK(elements_of(parse(
            R"({"shape": [2,2,2], "fill": 0, "set": [{"at": [1, null, 0], "to": 5},
                                                      {"at": [null, null, 1], "to": 7},
                                                      {"at": [0, 1, 1], "to": 9}]})")) ==
        std::vector<float>{0, 7, 0, 9, 5, 7, 5, 7});
}

TEST_CASE("bits are the dtype's own, little-endian") {
  const Tensor tensor = make_tensor(parse(R"({"shape": [1,1,2], "bits": "803fa17f"})"));
  const uint8_t wanted[] = {0x80, 0x3f, 0xa1, 0x7f};
  CHECK(std::memcmp(tensor.memory.data(), wanted, sizeof wanted) == 0);
  CHECK(elements_of(tensor.view)[0] == 1.0f);
}

TEST_CASE("strides spread the elements, and NaN lies between them") {
  const Tensor tensor =
      make_tensor(parse(R"({"shape": [2,1,2], "values": [1, 2, 3, 4], "strides": [5, 7, 2]})"));
  CHECK(tensor.view.strides == std::array<int64_t, 3>{5, 7, 2});
  REQUIRE(tensor.memory.size() == 8 * 2);  // 5 + 2 + 1 elements
  const auto* bits = reinterpret_cast<const uint16_t*>(tensor.memory.data());
  const uint16_t wanted[] = {0x3f80, 0x7fc0, 0x4000, 0x7fc0, 0x7fc0, 0x4040, 0x7fc0, 0x4080};
  CHECK(std::memcmp(bits, wanted, sizeof wanted) == 0);
  CHECK(elements_of(tensor.view) == std::vector<float>{1, 2, 3, 4});
}

TEST_CASE("strides may be negative, and anything on an axis of size 1") {
  const Tensor tensor = make_tensor(
      parse(R"({"shape": [2,1,2], "values": [1, 2, 3, 4], "strides": [-2, 1099511627776, 1]})"));
  CHECK(tensor.memory.size() == 4 * 2);
  CHECK(elements_of(tensor.view) == std::vector<float>{1, 2, 3, 4});
  CHECK(tensor.view.data == tensor.memory.data() + 4);
}

TEST_CASE("tensors without elements, and of fewer axes") {
  CHECK(elements_of(parse(R"({"shape": [0,1,64], "fill": 1})")).empty());
  CHECK(make_tensor(parse(R"({"shape": [0,1,64], "fill": 1})")).view.data != nullptr);
  CHECK(elements_of(parse(R"({"shape": [3], "values": [1, 2, 3], "set": [{"at": [1], "to": 9}]})",
                          0)) == std::vector<float>{1, 9, 3});
}

TEST_CASE("a million tokens are made, not written") {
  const TensorSpec spec =
      parse(R"({"shape": [1048576, 1, 64], "uniform": {"seed": 3, "low": 0, "high": 1}})");
  const Tensor tensor = make_tensor(spec);
  CHECK(tensor.memory.size() == size_t{1048576} * 64 * 2);
}

TEST_CASE("refusals name the field and what is expected") {
  CHECK(refusal(R"({"fill": 1})") == "field \"k.shape\" is missing");
  CHECK(refusal(R"({"shape": [1, 2], "fill": 1})") == "field \"k.shape\" has 2 sizes, expected 3");
  CHECK(refusal(R"({"shape": [1, -1, 2], "fill": 1})") ==
        "field \"k.shape[1]\" is -1, expected a whole number from 0 to 134217728");
  CHECK(refusal(R"({"shape": [1, 1.5, 2], "fill": 1})").find("k.shape[1]") != std::string::npos);
  CHECK(refusal(R"({"shape": [134217728, 134217728, 0], "fill": 1})") ==
        "field \"k.shape\" holds more than 134217728 elements");
  CHECK(refusal(R"({"shape": [1,1,2], "fill": 1, "values": [1, 2]})").find("has 2 of") !=
        std::string::npos);
  CHECK(refusal(R"({"shape": [1,1,2]})").find("has 0 of") != std::string::npos);
  CHECK(refusal(R"({"shape": [1,1,2], "values": [1]})") ==
        "field \"k.values\" has 1 numbers, the shape needs 2");
  CHECK(refusal(R"({"shape": [1,1,2], "values": [1, "nan"]})") ==
        "field \"k.values[1]\" is \"nan\", expected a number, \"NaN\", \"inf\" or \"-inf\"");
  CHECK(refusal(R"({"shape": [1,1,2], "fill": 1, "dtype": "fp64"})") ==
        "field \"k.dtype\" is \"fp64\", expected \"bf16\", \"fp16\" or \"fp32\"");
  CHECK(refusal(R"({"shape": [1,1,2], "bits": "80"})") ==
        "field \"k.bits\" has 1 bytes, the shape needs 4");
  CHECK(refusal(R"({"shape": [1,1,2], "bits": "8"})") ==
        "field \"k.bits\" is \"8\", expected pairs of hexadecimal digits");
  CHECK(refusal(R"({"shape": [1,1,2], "fill": 1, "set": [{"at": [0, 0, 2], "to": 1}]})") ==
        "field \"k.set[0].at[2]\" is 2, expected a whole number from 0 to 1");
  CHECK(refusal(R"({"shape": [0,1,2], "fill": 1, "set": [{"at": [0, 0, 1], "to": 1}]})") ==
        "field \"k.set[0].at[0]\" is an index of an axis without elements");
  CHECK(refusal(R"({"shape": [2,1,2], "fill": 1, "strides": [9223372036854775807, 1, 1]})") ==
        "field \"k.strides\" spread the tensor over more than 134217728 elements");
  CHECK(refusal(R"({"shape": [1,1,2], "uniform": {"seed": -1, "low": 0, "high": 1}})")
            .find("k.uniform.seed") != std::string::npos);
  CHECK(refusal(R"({"shape": [1,1,2], "uniform": {"seed": 1, "low": 0}})") ==
        "field \"k.uniform.high\" is missing");
  CHECK(refusal(R"({"shape": [1,1,2], "fill": 1, "size": 3})").find("\"k.size\" is unknown") !=
        std::string::npos);
  CHECK(refusal(R"([1])") == "field \"k\" is a list of 1, expected an object");
}

}  // namespace
}  // namespace larder::replay
