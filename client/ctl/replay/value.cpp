#include "client/ctl/replay/value.h"

#include <cmath>
#include <cstring>

#include "client/ctl/replay/fields.h"

namespace larder::replay {
namespace {

json nested(const Floats& floats, size_t axis, size_t& next) {
  if (axis == floats.shape.size()) return number_json(static_cast<double>(floats.values[next++]));
  json list = json::array();
  for (int64_t i = 0; i < floats.shape[axis]; ++i) list.push_back(nested(floats, axis + 1, next));
  return list;
}

json::binary_t to_binary(const void* data, size_t size) {
  std::vector<uint8_t> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  return bytes;
}

}  // namespace

const Value* Value::part(const std::string& name) const {
  if (const auto* parts = std::get_if<Parts>(&data))
    for (const Part& part : *parts)
      if (part.name == name) return &part.value;
  return nullptr;
}

bool has_numbers(const Value& value) {
  return std::holds_alternative<double>(value.data) || std::holds_alternative<Floats>(value.data) ||
         std::holds_alternative<ByteString>(value.data) ||
         std::holds_alternative<Blocks>(value.data);
}

size_t size_of(const Value& value) {
  if (const auto* floats = std::get_if<Floats>(&value.data)) return floats->values.size();
  if (const auto* bytes = std::get_if<ByteString>(&value.data)) return bytes->size();
  if (const auto* texts = std::get_if<Texts>(&value.data)) return texts->size();
  if (const auto* blocks = std::get_if<Blocks>(&value.data)) return blocks->size();
  return std::holds_alternative<double>(value.data) ? 1 : 0;
}

double number_at(const Value& value, size_t index) {
  if (const auto* floats = std::get_if<Floats>(&value.data))
    return static_cast<double>(floats->values[index]);
  if (const auto* bytes = std::get_if<ByteString>(&value.data)) return (*bytes)[index];
  if (const auto* blocks = std::get_if<Blocks>(&value.data)) return (*blocks)[index].id;
  return std::get<double>(value.data);
}

json number_json(double value) {
  if (!std::isfinite(value)) return shown(value);
  // Counts are written without a fraction.
  constexpr double kExact = 9007199254740992.0;
  if (value == std::floor(value) && std::fabs(value) <= kExact && !std::signbit(value))
    return static_cast<int64_t>(value);
  return value;
}

json to_json(const Value& value) {
  if (const auto* number = std::get_if<double>(&value.data)) return number_json(*number);
  if (const auto* floats = std::get_if<Floats>(&value.data)) {
    size_t next = 0;
    return nested(*floats, 0, next);
  }
  if (const auto* bytes = std::get_if<ByteString>(&value.data)) return to_hex(*bytes);
  if (const auto* texts = std::get_if<Texts>(&value.data)) return *texts;
  if (const auto* blocks = std::get_if<Blocks>(&value.data)) {
    json list = json::array();
    for (const BlockHandle& block : *blocks)
      list.push_back({{"id", block.id}, {"generation", block.generation}});
    return list;
  }
  if (const auto* parts = std::get_if<Parts>(&value.data)) {
    json object = json::object();
    for (const Part& part : *parts) object[part.name] = to_json(part.value);
    return object;
  }
  return nullptr;
}

json pack(const Value& value) {
  if (const auto* number = std::get_if<double>(&value.data)) return {{"number", *number}};
  if (const auto* floats = std::get_if<Floats>(&value.data))
    return {{"shape", floats->shape},
            {"floats", to_binary(floats->values.data(), floats->values.size() * sizeof(float))}};
  if (const auto* bytes = std::get_if<ByteString>(&value.data))
    return {{"bytes", to_binary(bytes->data(), bytes->size())}};
  if (const auto* texts = std::get_if<Texts>(&value.data)) return {{"texts", *texts}};
  if (const auto* blocks = std::get_if<Blocks>(&value.data)) {
    json list = json::array();
    for (const BlockHandle& block : *blocks) list.push_back({block.id, block.generation});
    return {{"blocks", list}};
  }
  if (const auto* parts = std::get_if<Parts>(&value.data)) {
    json list = json::array();
    for (const Part& part : *parts) list.push_back({part.name, pack(part.value)});
    return {{"parts", list}};
  }
  return json::object();
}

Value unpack(const json& packed) {
  if (packed.contains("number")) return {packed.at("number").get<double>()};
  if (packed.contains("floats")) {
    Floats floats{packed.at("shape").get<std::vector<int64_t>>(), {}};
    const auto& bytes = packed.at("floats").get_binary();
    floats.values.resize(bytes.size() / sizeof(float));
    if (!bytes.empty()) std::memcpy(floats.values.data(), bytes.data(), bytes.size());
    return {std::move(floats)};
  }
  if (packed.contains("bytes")) return {ByteString(packed.at("bytes").get_binary())};
  if (packed.contains("texts")) return {packed.at("texts").get<Texts>()};
  if (packed.contains("blocks")) {
    Blocks blocks;
    for (const json& block : packed.at("blocks"))
      blocks.push_back({block.at(0).get<int32_t>(), block.at(1).get<uint32_t>()});
    return {std::move(blocks)};
  }
  if (packed.contains("parts")) {
    Parts parts;
    for (const json& part : packed.at("parts"))
      parts.push_back({part.at(0).get<std::string>(), unpack(part.at(1))});
    return {std::move(parts)};
  }
  return {};
}

}  // namespace larder::replay
