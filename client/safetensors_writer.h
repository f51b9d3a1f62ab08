// Writes a safetensors file (client/safetensors.h reads them).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "larder/kv_format.h"

namespace larder {

struct TensorToWrite {
  std::string name;
  Dtype dtype = Dtype::kFp32;  // bf16, fp16 or fp32
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, as many as the shape needs (a bug otherwise)
};

// Under a temporary name first, so that nobody reads half of it. Throws SystemError.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors);

}  // namespace larder
