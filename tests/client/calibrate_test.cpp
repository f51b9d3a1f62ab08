// larderctl calibrate and the reader of its file: the means, and every dump that is refused.
#include "client/ctl/calibrate.h"

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "larder/key_offsets.h"
#include "tests/client/engine_files.h"

namespace larder::ctl {
namespace {

using examples::test::TemporaryFolder;

struct Entry {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

void write_dump(const std::string& path, const std::vector<Entry>& entries) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const Entry& entry : entries) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(entry.values.data()), entry.values.size() * 4);
    header[entry.name] = {
        {"dtype", "F32"}, {"shape", entry.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t size = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), 8);
  file << text << data;
}

struct Files {
  TemporaryFolder folder;
  std::string dump = (folder.path() / "keys.safetensors").string();
  std::string offsets = (folder.path() / "offsets.safetensors").string();

  std::string refusal(const std::vector<Entry>& entries, int64_t heads = 0, int64_t layers = 0) {
    write_dump(dump, entries);
    const auto made = calibrate(dump, offsets, heads, layers);
    REQUIRE(!made.ok());
    CHECK(!std::filesystem::exists(offsets));
    return made.status().to_string();
  }
};

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

constexpr AttentionGeometry kGeometry = {2, 1, 16, 2, 2, KvFormat::kBf16, KvFormat::kBf16};

TEST_CASE("the offsets are the means of every layer, head and dim") {
  Files files;
  write_dump(files.dump, {{"k.0", {3, 1, 2}, {1, 10, 2, 20, 6, 60}},
                          {"k.1", {2, 1, 2}, {-1, 0, -3, 1}},
                          {"v.0", {1}, {7}}});
  const auto made = calibrate(files.dump, files.offsets);
  REQUIRE_MESSAGE(made.ok(), made.status().message());
  CHECK(made->num_layers == 2);
  CHECK(made->num_kv_heads == 1);
  CHECK(made->k_dim == 2);
  CHECK(made->num_tokens == 3);
  const auto offsets = read_key_offsets(files.offsets, kGeometry);
  REQUIRE_MESSAGE(offsets.ok(), offsets.status().message());
  CHECK(*offsets == std::vector<float>{3, 30, -2, 0.5f});
}

TEST_CASE("sums are kept in double") {
  // In float32 the ones would be lost beside 2^25.
  std::vector<float> keys = {33554432.0f};
  keys.insert(keys.end(), 1023, 1.0f);
  Files files;
  write_dump(files.dump, {{"k.0", {1024, 1, 1}, keys}});
  REQUIRE(calibrate(files.dump, files.offsets).ok());
  const auto offsets =
      read_key_offsets(files.offsets, {1, 1, 16, 1, 1, KvFormat::kBf16, KvFormat::kBf16});
  CHECK(*offsets == std::vector<float>{static_cast<float>((33554432.0 + 1023.0) / 1024.0)});
}

TEST_CASE("dumps that are refused, with nothing written") {
  Files files;
  CHECK(has(files.refusal({{"x", {1}, {1}}}), "NOT_FOUND"));
  CHECK(has(files.refusal({{"k.01", {1, 1, 1}, {1}}}), "there is no tensor \"k.0\""));
  CHECK(has(files.refusal({{"k.0", {1, 1, 1}, {1}}, {"k.2", {1, 1, 1}, {1}}}),
            "there is no tensor \"k.1\", though \"k.2\" is there"));
  CHECK(has(files.refusal({{"k.9999", {1, 1, 1}, {1}}}), "past the limit of 4096 layers"));
  CHECK(has(files.refusal({{"k.0", {2, 1}, {1, 2}}}), "has shape [2, 1], expected [tokens"));
  CHECK(has(files.refusal({{"k.0", {1, 1, 2}, {1, 2}}, {"k.1", {2, 2, 1}, {1, 2, 3, 4}}}),
            "\"k.1\" has shape [2, 2, 1], \"k.0\" has [1, 1, 2]"));
  CHECK(has(files.refusal({{"k.0", {0, 1, 2}, {}}}), "has no tokens"));
  CHECK(has(files.refusal({{"k.0", {1, 0, 2}, {}}}), "which is empty"));
  CHECK(has(files.refusal({{"k.0", {2, 1, 2}, {1, 2, 3, std::numeric_limits<float>::quiet_NaN()}}}),
            "token 1 of \"k.0\" is NaN in element 1"));
  CHECK(has(files.refusal({{"k.0", {1, 1, 1}, {std::numeric_limits<float>::infinity()}}}),
            "is infinite"));
  CHECK(has(files.refusal({{"k.0", {1, 1, 1}, {1}}}, 2), "has 1 KV heads, --kv-heads says 2"));
  CHECK(has(files.refusal({{"k.0", {1, 1, 1}, {1}}}, 0, 2), "has 1 layers, --layers says 2"));
  CHECK(calibrate("/nonexistent", files.offsets).status().code() == ErrorCode::kNotFound);
}

TEST_CASE("an offsets file that does not fit the pool") {
  Files files;
  write_dump(files.offsets, {{"key_offset", {1, 1, 2}, {1, 2}}});
  const auto other = read_key_offsets(files.offsets, kGeometry);
  CHECK(has(other.status().message(),
            "\"key_offset\" has shape [1, 1, 2], the pool needs [2, 1, 2]"));
  write_dump(files.offsets, {{"offset", {1}, {1}}});
  CHECK(read_key_offsets(files.offsets, kGeometry).status().code() == ErrorCode::kNotFound);
  write_dump(files.offsets,
             {{"key_offset", {2, 1, 2}, {1, 2, std::numeric_limits<float>::infinity(), 4}}});
  CHECK(has(read_key_offsets(files.offsets, kGeometry).status().message(),
            "element 2 of \"key_offset\" is not finite"));
  CHECK(read_key_offsets("/nonexistent", kGeometry).status().code() == ErrorCode::kNotFound);
}

}  // namespace
}  // namespace larder::ctl
