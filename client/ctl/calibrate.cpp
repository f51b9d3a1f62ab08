#include "client/ctl/calibrate.h"

#include <algorithm>
#include <cmath>
#include <sys/stat.h>
#include <vector>

#include "client/safetensors.h"
#include "client/safetensors_writer.h"

namespace larder::ctl {
namespace {

constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxTensorElements = int64_t{1} << 31;  // 8 GiB as float32 while it is summed

Status refuse(const std::string& path, const std::string& sentence) {
  return {ErrorCode::kInvalidArgument, path + ": " + sentence};
}

// "k.7" -> 7; -1 for every other name.
int64_t layer_of(const std::string& name) {
  if (name.size() < 3 || name.size() > 6 || !name.starts_with("k.")) return -1;
  int64_t layer = 0;
  for (const char c : name.substr(2)) {
    if (c < '0' || c > '9') return -1;
    layer = layer * 10 + (c - '0');
  }
  return "k." + std::to_string(layer) == name ? layer : -1;
}

Status check_entry(const SafetensorsFile& file, const std::string& name,
                   const std::vector<int64_t>& shape, const std::vector<int64_t>& first) {
  const std::string field = "\"" + name + "\"";
  if (shape.size() != 3)
    return refuse(file.path(), field + " has shape " + shape_text(shape) +
                                   ", expected [tokens, kv_heads, k_dim]");
  if (shape[0] == 0) return refuse(file.path(), field + " has no tokens");
  if (shape[1] == 0 || shape[2] == 0)
    return refuse(file.path(), field + " has shape " + shape_text(shape) + ", which is empty");
  // The file holds all elements, so the product fits.
  if (shape[0] * shape[1] * shape[2] > kMaxTensorElements)
    return refuse(file.path(), field + " has shape " + shape_text(shape) + ", at most " +
                                   std::to_string(kMaxTensorElements) + " elements are read");
  if (shape[1] != first[1] || shape[2] != first[2])
    return refuse(file.path(), field + " has shape " + shape_text(shape) + ", \"k.0\" has " +
                                   shape_text(first) + "; heads and dims must be the same");
  return {};
}

// The layers of the dump: k.0 .. k.(n-1), every one there and of one shape.
Result<int64_t> count_layers(const SafetensorsFile& file) {
  int64_t highest = -1;
  for (const auto& [name, entry] : file.tensors()) highest = std::max(highest, layer_of(name));
  if (highest < 0)
    return Status(ErrorCode::kNotFound,
                  file.path() + ": there is no tensor \"k.0\", keys are named \"k.LAYER\"");
  if (highest >= kMaxLayers)
    return refuse(file.path(), "\"k." + std::to_string(highest) + "\" is past the limit of " +
                                   std::to_string(kMaxLayers) + " layers");
  for (int64_t layer = 0; layer <= highest; ++layer) {
    const std::string name = "k." + std::to_string(layer);
    const auto found = file.tensors().find(name);
    if (found == file.tensors().end())
      return Status(ErrorCode::kNotFound, file.path() + ": there is no tensor \"" + name +
                                              "\", though \"k." + std::to_string(highest) +
                                              "\" is there");
    const Status status =
        check_entry(file, name, found->second.shape, file.tensors().at("k.0").shape);
    if (!status.ok()) return status;
  }
  return highest + 1;
}

Status add_means(const SafetensorsFile& file, int64_t layer, std::vector<float>& means) {
  const std::string name = "k." + std::to_string(layer);
  const std::vector<int64_t>& shape = file.tensors().at(name).shape;
  std::vector<float> keys(static_cast<size_t>(shape[0] * shape[1] * shape[2]));
  if (Status status = file.read(name, shape, keys); !status.ok()) return status;
  const auto row = static_cast<size_t>(shape[1] * shape[2]);
  std::vector<double> sums(row, 0.0);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!std::isfinite(keys[i]))
      return refuse(file.path(), "token " + std::to_string(i / row) + " of \"" + name + "\" is " +
                                     (std::isnan(keys[i]) ? "NaN" : "infinite") + " in element " +
                                     std::to_string(i % row));
    sums[i % row] += static_cast<double>(keys[i]);
  }
  for (const double sum : sums)
    means.push_back(static_cast<float>(sum / static_cast<double>(shape[0])));
  return {};
}

void write_offsets(const std::filesystem::path& path, const Calibration& made,
                   const std::vector<float>& means) {
  const TensorToWrite tensor{"key_offset",
                             Dtype::kFp32,
                             {made.num_layers, made.num_kv_heads, made.k_dim},
                             std::as_bytes(std::span(means))};
  write_safetensors(path, std::span(&tensor, 1));
}

}  // namespace

Result<Calibration> calibrate(const std::filesystem::path& dump,
                              const std::filesystem::path& offsets, int64_t num_kv_heads,
                              int64_t num_layers) {
  const auto file = SafetensorsFile::open(dump);
  if (!file) return file.status();
  const auto layers = count_layers(*file);
  if (!layers) return layers.status();
  const std::vector<int64_t>& shape = file->tensors().at("k.0").shape;
  if (num_layers > 0 && *layers != num_layers)
    return refuse(file->path(), "has " + std::to_string(*layers) + " layers, --layers says " +
                                    std::to_string(num_layers));
  if (num_kv_heads > 0 && shape[1] != num_kv_heads)
    return refuse(file->path(), "has " + std::to_string(shape[1]) + " KV heads, --kv-heads says " +
                                    std::to_string(num_kv_heads));
  const Calibration made{*layers, shape[1], shape[2], shape[0]};
  std::vector<float> means;
  for (int64_t layer = 0; layer < *layers; ++layer)
    if (Status status = add_means(*file, layer, means); !status.ok()) return status;
  write_offsets(offsets, made, means);
  return made;
}

}  // namespace larder::ctl
