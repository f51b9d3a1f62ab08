#include "larder/key_offsets.h"

#include <array>
#include <cmath>

#include "client/safetensors.h"

namespace larder {

Result<std::vector<float>> read_key_offsets(const std::string& path,
                                            const AttentionGeometry& geometry) {
  auto file = SafetensorsFile::open(path);
  if (!file) return file.status();
  const std::array<int64_t, 3> shape = {geometry.num_layers, geometry.num_kv_heads, geometry.k_dim};
  const auto found = file->tensors().find("key_offset");
  if (found == file->tensors().end())
    return Status(ErrorCode::kNotFound, path + ": there is no tensor \"key_offset\"");
  const std::vector<int64_t>& stored = found->second.shape;
  if (stored != std::vector<int64_t>(shape.begin(), shape.end()))
    return Status(ErrorCode::kInvalidArgument,
                  path + ": \"key_offset\" has shape " + shape_text(stored) + ", the pool needs " +
                      shape_text(shape) + " (layers, KV heads, k_dim)");
  std::vector<float> offsets(static_cast<size_t>(shape[0] * shape[1] * shape[2]));
  if (Status status = file->read("key_offset", shape, offsets); !status.ok()) return status;
  for (size_t i = 0; i < offsets.size(); ++i)
    if (!std::isfinite(offsets[i]))
      return Status(ErrorCode::kInvalidArgument,
                    path + ": element " + std::to_string(i) + " of \"key_offset\" is not finite");
  return offsets;
}

}  // namespace larder
