// What a step yields: numbers, tensors in float32, bytes, blocks, or parts with names.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "larder/client.h"
#include "larder/status.h"

namespace larder::replay {

using nlohmann::json;

struct Floats {
  std::vector<int64_t> shape;
  std::vector<float> values;  // row-major
};
using ByteString = std::vector<uint8_t>;  // written as hex
using Texts = std::vector<std::string>;
using Blocks = std::vector<BlockHandle>;
struct Part;
using Parts = std::vector<Part>;

struct Value {
  std::variant<std::monostate, double, Floats, ByteString, Texts, Blocks, Parts> data;

  // The part of that name; nullptr where there is none.
  const Value* part(const std::string& name) const;
};
struct Part {
  std::string name;
  Value value;
};

using Results = std::map<std::string, Value>;

// A refusal, or ok and the value.
struct Outcome {
  Status status;
  Value value;
};
inline Outcome refused(ErrorCode code, std::string message) {
  return {Status(code, std::move(message)), {}};
}

// Leaves (everything but Parts) seen as numbers: blocks by their ids. Texts have none.
bool has_numbers(const Value& value);
size_t size_of(const Value& value);
double number_at(const Value& value, size_t index);

// For people and programs: arrays nested as their shape, "NaN", "inf", "-inf" as texts.
json to_json(const Value& value);
json number_json(double value);

// For the other end of a socket: nothing is lost, tensors travel as bytes.
json pack(const Value& value);
// Throws json::exception for what pack() does not write.
Value unpack(const json& packed);

}  // namespace larder::replay
