#include <array>
#include <cmath>
#include <fstream>
#include <limits>

#include <doctest/doctest.h>

#include "client/safetensors.h"
#include "tests/client/engine_files.h"
#include "tests/support/random.h"

using namespace larder;
using namespace larder::examples;
using larder::examples::test::little_endian;
using larder::examples::test::safetensors_bytes;
using larder::examples::test::TemporaryFolder;
using larder::examples::test::zero_safetensors;

namespace {

// One tensor "a" with this entry, over `data_bytes` bytes of data.
Status open_entry(const std::string& entry, size_t data_bytes) {
  const TemporaryFolder folder;
  const auto path =
      folder.write("f", safetensors_bytes("{\"a\":" + entry + "}", std::string(data_bytes, '\0')));
  return SafetensorsFile::open(path).status();
}

Status open_bytes(const std::string& bytes) {
  const TemporaryFolder folder;
  return SafetensorsFile::open(folder.write("f", bytes)).status();
}

void check_refused(const Status& status, ErrorCode code, const std::string& part) {
  CHECK(status.code() == code);
  INFO(status.to_string());
  CHECK(status.message().find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("tensors of the three dtypes read as float32") {
  // bf16 1.5, -2, NaN; fp16 1.5, -2, 2^-24 (the smallest subnormal), -inf; fp32 0.25.
  const std::string data(
      "\xc0\x3f\x00\xc0\xc0\x7f"
      "\x00\x3e\x00\xc0\x01\x00\x00\xfc"
      "\x00\x00\x80\x3e",
      18);
  const TemporaryFolder folder;
  const auto file = SafetensorsFile::open(folder.write(
      "f",
      safetensors_bytes("{\"__metadata__\":{\"format\":\"pt\"},"
                        "\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]},"
                        "\"h\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[6,14]},"
                        "\"f\":{\"dtype\":\"F32\",\"shape\":[1,1,1],\"data_offsets\":[14,18]}}  ",
                        data)));
  REQUIRE(file.ok());
  CHECK(file->tensors().size() == 3);
  std::array<float, 4> out = {};
  REQUIRE(file->read("b", std::array<int64_t, 1>{3}, std::span(out).first(3)).ok());
  CHECK(out[0] == 1.5f);
  CHECK(out[1] == -2.0f);
  CHECK(std::isnan(out[2]));
  REQUIRE(file->read("h", std::array<int64_t, 2>{2, 2}, out).ok());
  CHECK(out[0] == 1.5f);
  CHECK(out[1] == -2.0f);
  CHECK(out[2] == std::ldexp(1.0f, -24));
  CHECK(out[3] == -std::numeric_limits<float>::infinity());
  REQUIRE(file->read("f", std::array<int64_t, 3>{1, 1, 1}, std::span(out).first(1)).ok());
  CHECK(out[0] == 0.25f);
}

TEST_CASE("a tensor longer than one read step keeps its order") {
  const int64_t count = 40000;
  std::string data;
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(i);
    data.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  const TemporaryFolder folder;
  const auto file = SafetensorsFile::open(folder.write(
      "f", safetensors_bytes(
               "{\"a\":{\"dtype\":\"F32\",\"shape\":[40000],\"data_offsets\":[0,160000]}}", data)));
  REQUIRE(file.ok());
  std::vector<float> out(static_cast<size_t>(count));
  REQUIRE(file->read("a", std::array<int64_t, 1>{count}, out).ok());
  for (size_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == static_cast<float>(i));
}

TEST_CASE("an empty header, a scalar and a tensor with no elements are legal") {
  CHECK(open_bytes(safetensors_bytes("{}", "")).ok());
  CHECK(open_entry(R"({"dtype":"F32","shape":[],"data_offsets":[0,4]})", 4).ok());
  CHECK(open_entry(R"({"dtype":"F32","shape":[0,7],"data_offsets":[0,0]})", 0).ok());
}

TEST_CASE("reading another name or shape is refused with both shapes") {
  const TemporaryFolder folder;
  const auto file = SafetensorsFile::open(folder.write("f", zero_safetensors({{"a", {2, 3}}})));
  REQUIRE(file.ok());
  std::array<float, 6> out = {};
  check_refused(file->read("b", std::array<int64_t, 2>{2, 3}, out), ErrorCode::kNotFound,
                "no tensor \"b\"");
  check_refused(file->read("a", std::array<int64_t, 2>{3, 2}, out), ErrorCode::kInvalidArgument,
                "has shape [2, 3], expected [3, 2]");
}

TEST_CASE("a wrong header length is refused with the numbers") {
  check_refused(open_bytes(""), ErrorCode::kInvalidArgument, "has 0 bytes");
  check_refused(open_bytes("1234567"), ErrorCode::kInvalidArgument, "has 7 bytes");
  check_refused(open_bytes(little_endian(3) + "{}"), ErrorCode::kInvalidArgument,
                "header length is 3, but only 2 bytes follow");
  check_refused(open_bytes(little_endian(~uint64_t{0}) + "{}"), ErrorCode::kInvalidArgument,
                "header length is 18446744073709551615");
  check_refused(open_bytes(little_endian(0)), ErrorCode::kInvalidArgument, "is not JSON");
}

TEST_CASE("a header past the limit is refused before it is read") {
  const TemporaryFolder folder;
  const uint64_t length = static_cast<uint64_t>(kMaxSafetensorsHeaderBytes) + 1;
  const auto path = folder.write("f", little_endian(length));
  std::filesystem::resize_file(path, 8 + length);  // sparse: it takes no room
  check_refused(SafetensorsFile::open(path).status(), ErrorCode::kInvalidArgument,
                "header length is 104857601, at most 104857600");
}

TEST_CASE("a header that is not a JSON object is refused") {
  check_refused(open_bytes(safetensors_bytes("{\"a\":", "")), ErrorCode::kInvalidArgument,
                "the header is not JSON");
  check_refused(open_bytes(safetensors_bytes("[1]", "")), ErrorCode::kInvalidArgument,
                "the header is not a JSON object");
  check_refused(open_bytes(safetensors_bytes(std::string(100000, '['), "")),
                ErrorCode::kInvalidArgument, "the header is not JSON");
  check_refused(open_bytes(safetensors_bytes("{\"\xff\":1}", "")), ErrorCode::kInvalidArgument,
                "the header is not JSON");
}

TEST_CASE("a wrong field of an entry is refused by name") {
  const auto invalid = ErrorCode::kInvalidArgument;
  check_refused(open_entry("7", 0), invalid, "\"a\": the entry is not a JSON object");
  check_refused(open_entry("{}", 0), invalid, "needs dtype, shape and data_offsets");
  check_refused(open_entry(R"({"dtype":"I64","shape":[1],"data_offsets":[0,8]})", 8),
                ErrorCode::kUnsupported, "dtype is \"I64\"");
  check_refused(open_entry(R"({"dtype":4,"shape":[1],"data_offsets":[0,4]})", 4),
                ErrorCode::kUnsupported, "dtype is \"number\"");
  check_refused(open_entry(R"({"dtype":"F32","shape":4,"data_offsets":[0,4]})", 4), invalid,
                "shape must be a list");
  check_refused(
      open_entry(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]})", 4), invalid,
      "at most 8 sizes");
  for (const char* axis : {"-1", "1.5", "\"1\"", "18446744073709551615", "1e3", "null"})
    check_refused(
        open_entry(R"({"dtype":"F32","shape":[)" + std::string(axis) + R"(],"data_offsets":[0,4]})",
                   4),
        invalid, "shape has");
}

TEST_CASE("offsets outside the data, or of another size than the shape, are refused") {
  const auto with_offsets = [](const std::string& offsets) {
    return open_entry(R"({"dtype":"F32","shape":[2],"data_offsets":)" + offsets + "}", 8);
  };
  CHECK(with_offsets("[0,8]").ok());
  for (const char* offsets : {"8", "[8]", "[0,8,9]", "[-1,8]", "[0,8.0]", "[0,\"8\"]",
                              "[0,18446744073709551615]", "[0,9223372036854775807]"})
    check_refused(with_offsets(offsets), ErrorCode::kInvalidArgument, "data_offsets must be two");
  check_refused(with_offsets("[0,9]"), ErrorCode::kInvalidArgument,
                "data_offsets are [0, 9], but the file has 8 bytes");
  check_refused(with_offsets("[8,0]"), ErrorCode::kInvalidArgument, "data_offsets are [8, 0]");
  check_refused(with_offsets("[0,4611686018427387904]"), ErrorCode::kInvalidArgument,
                "but the file has 8 bytes");
  check_refused(with_offsets("[0,4]"), ErrorCode::kInvalidArgument,
                "shape [2] takes 8 bytes, data_offsets hold 4");
}

TEST_CASE("a shape whose product overflows is refused") {
  check_refused(
      open_entry(R"({"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]})", 8),
      ErrorCode::kInvalidArgument, "takes more than 2^63 bytes");
}

TEST_CASE("overlaps, holes and bytes that no tensor owns are refused") {
  const auto two = [](const std::string& first, const std::string& second, size_t data_bytes) {
    return open_bytes(
        safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)" + first +
                              R"(},"b":{"dtype":"F32","shape":[2],"data_offsets":)" + second + "}}",
                          std::string(data_bytes, '\0')));
  };
  CHECK(two("[0,8]", "[8,16]", 16).ok());
  CHECK(two("[8,16]", "[0,8]", 16).ok());
  check_refused(two("[0,8]", "[4,12]", 12), ErrorCode::kInvalidArgument,
                "\"b\" begins at byte 4 and overlaps");
  check_refused(two("[0,8]", "[0,8]", 8), ErrorCode::kInvalidArgument, "and overlaps");
  check_refused(two("[0,8]", "[12,20]", 20), ErrorCode::kInvalidArgument,
                "\"b\" begins at byte 12 and leaves a hole");
  check_refused(two("[0,8]", "[8,16]", 20), ErrorCode::kInvalidArgument,
                "the tensors end at byte 16, but the file has 20");
}

TEST_CASE("a path that is missing or not a file is refused") {
  const TemporaryFolder folder;
  check_refused(SafetensorsFile::open(folder.path() / "no").status(), ErrorCode::kNotFound,
                "does not exist");
  check_refused(SafetensorsFile::open(folder.path()).status(), ErrorCode::kInvalidArgument,
                "not a regular file");
}

TEST_CASE("a file that shrinks after it was opened is refused, not a crash") {
  const TemporaryFolder folder;
  const auto path = folder.write("f", zero_safetensors({{"a", {1000}}}));
  const auto file = SafetensorsFile::open(path);
  REQUIRE(file.ok());
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
  std::vector<float> out(1000);
  check_refused(file->read("a", std::array<int64_t, 1>{1000}, out), ErrorCode::kInvalidArgument,
                "ends at byte");
}

TEST_CASE("random damage to a file is refused or harmless") {
  const std::string good = zero_safetensors({{"a", {2, 3}}, {"b", {5}}});
  auto random = larder::test::random_engine(1);
  const TemporaryFolder folder;
  for (int round = 0; round < 500; ++round) {
    std::string bytes = good.substr(0, random() % 8 == 0 ? random() % good.size() : good.size());
    for (uint64_t changes = random() % 4; changes > 0 && !bytes.empty(); --changes)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    const auto file = SafetensorsFile::open(folder.write("f", bytes));
    if (!file) {
      CHECK_FALSE(file.status().message().empty());
      continue;
    }
    std::array<float, 6> out = {};
    (void)file->read("a", std::array<int64_t, 2>{2, 3}, out).ok();
  }
}
