// A safetensors file: eight bytes with the header's length, a JSON header that names the tensors,
// and their bytes (https://github.com/huggingface/safetensors#format).
//
// open() checks the whole header: afterwards every tensor lies inside the file, tensors neither
// overlap nor leave holes, and every byte count fits its shape. Tensors are read one at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "client/file_reader.h"
#include "larder/kv_format.h"
#include "larder/status.h"

namespace larder {

inline constexpr int64_t kMaxSafetensorsHeaderBytes = int64_t{100} << 20;  // larger: refused
inline constexpr size_t kMaxTensorRank = 8;

struct SafetensorsEntry {
  Dtype dtype = Dtype::kFp32;
  std::vector<int64_t> shape;
  int64_t offset_bytes = 0;  // from the start of the data, which follows the header
  int64_t size_bytes = 0;
};

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::filesystem::path& path);

  const std::string& path() const { return file_.path(); }
  const std::map<std::string, SafetensorsEntry>& tensors() const { return tensors_; }

  // The tensor as float32. NOT_FOUND for a name that is not there, INVALID_ARGUMENT for another
  // shape. `out` has the elements of `shape`.
  Status read(const std::string& name, std::span<const int64_t> shape, std::span<float> out) const;

 private:
  SafetensorsFile(FileReader file, int64_t data_offset_bytes,
                  std::map<std::string, SafetensorsEntry> tensors)
      : file_(std::move(file)),
        data_offset_bytes_(data_offset_bytes),
        tensors_(std::move(tensors)) {}

  FileReader file_;
  int64_t data_offset_bytes_ = 0;
  std::map<std::string, SafetensorsEntry> tensors_;
};

// "[256, 704]"
std::string shape_text(std::span<const int64_t> shape);

}  // namespace larder
