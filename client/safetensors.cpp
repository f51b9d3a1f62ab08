#include "client/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include <nlohmann/json.hpp>

namespace larder {
namespace {

using nlohmann::json;

// Messages quote names from the file; a hostile one must not fill the terminal.
constexpr size_t kMaxQuotedNameBytes = 120;
constexpr size_t kReadStepElements = 16384;

Status refuse(const std::string& path, const std::string& sentence) {
  return Status(ErrorCode::kInvalidArgument, path + ": " + sentence);
}

std::string quoted(const std::string& name) {
  std::string text = "\"";
  for (const char c : name.substr(0, kMaxQuotedNameBytes)) text += (c >= ' ' && c <= '~') ? c : '?';
  return text + (name.size() > kMaxQuotedNameBytes ? "...\"" : "\"");
}

float half_to_float(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31)
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity()
                         : std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

float element_to_float(Dtype dtype, const char* bytes) {
  if (dtype == Dtype::kFp32) {
    float value = 0;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof(bits));
  return dtype == Dtype::kFp16 ? half_to_float(bits)
                               : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

std::optional<Dtype> parse_dtype(const json& value) {
  if (!value.is_string()) return std::nullopt;
  const auto& text = value.get_ref<const std::string&>();
  if (text == "BF16") return Dtype::kBf16;
  if (text == "F16") return Dtype::kFp16;
  if (text == "F32") return Dtype::kFp32;
  return std::nullopt;
}

// Whole numbers from 0 to 2^62; everything else that JSON can hold is empty.
std::optional<int64_t> parse_count(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<uint64_t>();
  if (number > uint64_t{1} << 62) return std::nullopt;
  return static_cast<int64_t>(number);
}

Result<std::vector<int64_t>> parse_shape(const json& value, const std::string& where) {
  if (!value.is_array() || value.size() > kMaxTensorRank)
    return Status(ErrorCode::kInvalidArgument, where + ": shape must be a list of at most " +
                                                   std::to_string(kMaxTensorRank) + " sizes");
  std::vector<int64_t> shape;
  for (const json& axis : value) {
    const auto size = parse_count(axis);
    if (!size)
      return Status(ErrorCode::kInvalidArgument,
                    where + ": shape has " + (axis.is_number() ? axis.dump() : axis.type_name()) +
                        ", expected a whole number >= 0");
    shape.push_back(*size);
  }
  return shape;
}

// Bytes of a tensor; empty if the product passes 2^63.
std::optional<int64_t> shape_bytes(std::span<const int64_t> shape, Dtype dtype) {
  int64_t size_bytes = dtype_bytes(dtype);
  for (const int64_t axis : shape)
    if (__builtin_mul_overflow(size_bytes, axis, &size_bytes)) return std::nullopt;
  return size_bytes;
}

const json* find_field(const json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

Status parse_offsets(const json& value, const std::string& where, int64_t data_bytes,
                     SafetensorsEntry& entry) {
  std::optional<int64_t> begin, end;
  if (value.is_array() && value.size() == 2) {
    begin = parse_count(value[0]);
    end = parse_count(value[1]);
  }
  if (!begin || !end)
    return Status(ErrorCode::kInvalidArgument,
                  where + ": data_offsets must be two whole numbers >= 0");
  if (*begin > *end || *end > data_bytes)
    return Status(ErrorCode::kInvalidArgument, where + ": data_offsets are [" +
                                                   std::to_string(*begin) + ", " +
                                                   std::to_string(*end) + "], but the file has " +
                                                   std::to_string(data_bytes) + " bytes of data");
  entry.offset_bytes = *begin;
  entry.size_bytes = *end - *begin;
  return {};
}

Result<SafetensorsEntry> parse_entry(const json& value, const std::string& where,
                                     int64_t data_bytes) {
  if (!value.is_object())
    return Status(ErrorCode::kInvalidArgument, where + ": the entry is not a JSON object");
  const json* dtype_field = find_field(value, "dtype");
  const json* shape_field = find_field(value, "shape");
  const json* offsets_field = find_field(value, "data_offsets");
  if (!dtype_field || !shape_field || !offsets_field)
    return Status(ErrorCode::kInvalidArgument,
                  where + ": the entry needs dtype, shape and data_offsets");
  SafetensorsEntry entry;
  const auto dtype = parse_dtype(*dtype_field);
  if (!dtype)
    return Status(ErrorCode::kUnsupported,
                  where + ": dtype is " +
                      quoted(dtype_field->is_string() ? dtype_field->get<std::string>()
                                                      : dtype_field->type_name()) +
                      ", supported are BF16, F16 and F32");
  entry.dtype = *dtype;
  auto shape = parse_shape(*shape_field, where);
  if (!shape) return shape.status();
  entry.shape = std::move(*shape);
  if (Status status = parse_offsets(*offsets_field, where, data_bytes, entry); !status.ok())
    return status;
  const auto wanted_bytes = shape_bytes(entry.shape, entry.dtype);
  if (!wanted_bytes || *wanted_bytes != entry.size_bytes)
    return Status(ErrorCode::kInvalidArgument,
                  where + ": shape " + shape_text(entry.shape) + " takes " +
                      (wanted_bytes ? std::to_string(*wanted_bytes) : "more than 2^63") +
                      " bytes, data_offsets hold " + std::to_string(entry.size_bytes));
  return entry;
}

// The format allows neither holes nor overlaps: the tensors tile the data.
Status check_tiling(const std::string& path, const std::map<std::string, SafetensorsEntry>& tensors,
                    int64_t data_bytes) {
  std::vector<std::pair<const std::string*, const SafetensorsEntry*>> order;
  order.reserve(tensors.size());
  for (const auto& [name, entry] : tensors) order.emplace_back(&name, &entry);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->offset_bytes, a.second->size_bytes) <
           std::pair(b.second->offset_bytes, b.second->size_bytes);
  });
  int64_t end_bytes = 0;
  for (const auto& [name, entry] : order) {
    if (entry->offset_bytes != end_bytes)
      return refuse(path, quoted(*name) + " begins at byte " + std::to_string(entry->offset_bytes) +
                              (entry->offset_bytes < end_bytes ? " and overlaps"
                                                               : " and leaves a hole after") +
                              " the tensor that ends at byte " + std::to_string(end_bytes));
    end_bytes += entry->size_bytes;
  }
  if (end_bytes != data_bytes)
    return refuse(path, "the tensors end at byte " + std::to_string(end_bytes) +
                            ", but the file has " + std::to_string(data_bytes) + " bytes of data");
  return {};
}

Result<json> read_header(const FileReader& file, int64_t& header_bytes) {
  std::array<char, 8> prefix = {};
  if (file.size_bytes() < static_cast<int64_t>(prefix.size()))
    return refuse(file.path(), "the file has " + std::to_string(file.size_bytes()) +
                                   " bytes, a safetensors file has at least 8");
  if (Status status = file.read(0, prefix); !status.ok()) return status;
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i)
    length = length << 8 | static_cast<uint8_t>(prefix[static_cast<size_t>(i)]);
  if (length > static_cast<uint64_t>(file.size_bytes() - 8))
    return refuse(file.path(), "header length is " + std::to_string(length) + ", but only " +
                                   std::to_string(file.size_bytes() - 8) + " bytes follow");
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes))
    return refuse(file.path(), "header length is " + std::to_string(length) + ", at most " +
                                   std::to_string(kMaxSafetensorsHeaderBytes) + " is read");
  header_bytes = static_cast<int64_t>(length);
  std::string text(length, '\0');
  if (Status status = file.read(8, text); !status.ok()) return status;
  auto header = parse_json(text, file.path() + ": the header");
  if (header && !header->is_object()) return refuse(file.path(), "the header is not a JSON object");
  return header;
}

}  // namespace

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  auto file = FileReader::open(path);
  if (!file) return file.status();
  int64_t header_bytes = 0;
  const auto header = read_header(*file, header_bytes);
  if (!header) return header.status();
  const int64_t data_offset_bytes = 8 + header_bytes;
  const int64_t data_bytes = file->size_bytes() - data_offset_bytes;
  std::map<std::string, SafetensorsEntry> tensors;
  for (const auto& [name, value] : header->items()) {
    if (name == "__metadata__") continue;
    auto entry = parse_entry(value, file->path() + ": " + quoted(name), data_bytes);
    if (!entry) return entry.status();
    tensors.emplace(name, std::move(*entry));
  }
  if (Status status = check_tiling(file->path(), tensors, data_bytes); !status.ok()) return status;
  return SafetensorsFile(std::move(*file), data_offset_bytes, std::move(tensors));
}

Status SafetensorsFile::read(const std::string& name, std::span<const int64_t> shape,
                             std::span<float> out) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end())
    return Status(ErrorCode::kNotFound, path() + ": there is no tensor " + quoted(name));
  const SafetensorsEntry& entry = found->second;
  if (!std::equal(shape.begin(), shape.end(), entry.shape.begin(), entry.shape.end()))
    return refuse(path(), quoted(name) + " has shape " + shape_text(entry.shape) + ", expected " +
                              shape_text(shape));
  const auto element_bytes = static_cast<size_t>(dtype_bytes(entry.dtype));
  LARDER_CHECK(out.size() * element_bytes == static_cast<size_t>(entry.size_bytes), out.size());
  std::vector<char> raw(std::min(out.size(), kReadStepElements) * element_bytes);
  for (size_t first = 0; first < out.size(); first += kReadStepElements) {
    const size_t count = std::min(kReadStepElements, out.size() - first);
    const int64_t offset_bytes =
        data_offset_bytes_ + entry.offset_bytes + static_cast<int64_t>(first * element_bytes);
    if (Status status = file_.read(offset_bytes, std::span(raw).first(count * element_bytes));
        !status.ok())
      return status;
    for (size_t i = 0; i < count; ++i)
      out[first + i] = element_to_float(entry.dtype, raw.data() + i * element_bytes);
  }
  return {};
}

}  // namespace larder
