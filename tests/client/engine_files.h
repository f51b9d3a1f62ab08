// Model files made by hand, for the tests of the example engine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdlib.h>
#include <string>
#include <vector>

#include "larder/check.h"

namespace larder::examples::test {

// A folder of its own under the system's temporary folder, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "larder-engine-XXXXXX").string();
    LARDER_CHECK(::mkdtemp(pattern.data()) != nullptr, pattern);
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::string little_endian(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

// Length, header and data, whatever they are.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  return little_endian(header.size()) + header + data;
}

// A well-formed file of F32 tensors filled with zeros.
struct ZeroTensor {
  std::string name;
  std::vector<int64_t> shape;
};
inline std::string zero_safetensors(const std::vector<ZeroTensor>& tensors) {
  std::string header = "{";
  int64_t end_bytes = 0;
  for (const ZeroTensor& tensor : tensors) {
    int64_t size_bytes = 4;
    std::string shape;
    for (const int64_t axis : tensor.shape) {
      size_bytes *= axis;
      shape += (shape.empty() ? "" : ",") + std::to_string(axis);
    }
    header += (header.size() > 1 ? ",\"" : "\"") + tensor.name +
              "\":{\"dtype\":\"F32\",\"shape\":[" + shape + "],\"data_offsets\":[" +
              std::to_string(end_bytes) + "," + std::to_string(end_bytes + size_bytes) + "]}";
    end_bytes += size_bytes;
  }
  return safetensors_bytes(header + "}", std::string(static_cast<size_t>(end_bytes), '\0'));
}

}  // namespace larder::examples::test
