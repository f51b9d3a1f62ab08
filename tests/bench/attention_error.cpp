// How far attention is from that over bf16 keys and values, for a model's real queries, keys and
// values.
//
//   attention_error SOCKET DEVICE DUMP CONTEXT K_FORMAT V_FORMAT ENCODER TRANSFORM [OFFSETS]
//
// DUMP is what `larder-generate --score TEXT --dump-attention DUMP` writes; CONTEXT the tokens of
// each window in it. Two pools on the node at SOCKET, of bf16 and of the named format, get the same
// rows, and all queries of a window attend causally in both. Prints, as JSON, the relative error
// |out - out_bf16| / |out_bf16| (Euclidean norms over all windows, rows and heads): per layer, and
// over all layers together.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <nlohmann/json.hpp>

#include "client/safetensors.h"
#include "larder/check.h"
#include "larder/client.h"
#include "larder/key_offsets.h"

namespace larder::test {
namespace {

using nlohmann::json;

void must(const Status& status) { LARDER_CHECK(status.ok(), status.to_string()); }
template <typename Value>
Value must(Result<Value> result) {
  must(result.status());
  return std::move(*result);
}

template <typename Enum, size_t size>
Enum parse(const std::array<std::string_view, size>& names, const std::string& text) {
  for (size_t i = 0; i < size; ++i)
    if (names[i] == text) return static_cast<Enum>(i);
  LARDER_CHECK(false, "no such format, encoder or transform", text);
  std::abort();
}

// [tokens, heads, dim] of one layer.
struct Rows {
  std::vector<int64_t> shape;
  std::vector<float> values;

  TensorView window(int64_t first, int64_t count) {
    return dense_tensor(values.data() + first * shape[1] * shape[2], Dtype::kFp32, count, shape[1],
                        shape[2]);
  }
};

Rows read_rows(const SafetensorsFile& file, const std::string& name) {
  const auto found = file.tensors().find(name);
  LARDER_CHECK(found != file.tensors().end(), file.path(), "has no tensor", name);
  Rows rows{found->second.shape, {}};
  LARDER_CHECK(rows.shape.size() == 3 && rows.shape[0] > 0, name);
  rows.values.resize(static_cast<size_t>(rows.shape[0] * rows.shape[1] * rows.shape[2]));
  must(file.read(name, rows.shape, rows.values));
  return rows;
}

struct Arguments {
  std::string socket, device, dump;
  int64_t context;
  GroupOptions group;
  std::string offsets;
};

Arguments parse_arguments(const std::vector<std::string>& a) {
  LARDER_CHECK(a.size() == 8 || a.size() == 9,
               "expected SOCKET DEVICE DUMP CONTEXT K_FORMAT V_FORMAT ENCODER TRANSFORM [OFFSETS]");
  Arguments result{a[0], a[1], a[2], std::atoll(a[3].c_str()), {}, a.size() == 9 ? a[8] : ""};
  LARDER_CHECK(result.context > 0, "CONTEXT must be a number of 1 or more", a[3]);
  result.group.geometry.k_format = parse<KvFormat>(kKvFormatNames, a[4]);
  result.group.geometry.v_format = parse<KvFormat>(kKvFormatNames, a[5]);
  result.group.encoder = parse<Encoder>(kEncoderNames, a[6]);
  result.group.key_transform = parse<KeyTransform>(kKeyTransformNames, a[7]);
  return result;
}

PoolOptions pool_options(const std::string& name, const Arguments& arguments,
                         const GroupOptions& group) {
  PoolOptions options;
  static_cast<GroupOptions&>(options) = group;
  options.name = name;
  options.model = "attention-error@1";
  options.device = arguments.device;
  return options;
}

// One layer's rows of a window through both pools.
struct Sums {
  double error = 0, reference = 0;
};
void attend_both(std::array<Sequence, 2>& sequences, int32_t layer, std::array<Rows, 3>& qkv,
                 int64_t first, int64_t count, Sums& sums) {
  std::array<Rows, 2> out;
  for (size_t i = 0; i < 2; ++i) {
    out[i].shape = {count, qkv[0].shape[1], qkv[2].shape[2]};
    out[i].values.resize(static_cast<size_t>(count * out[i].shape[1] * out[i].shape[2]));
    must(sequences[i].append(layer, qkv[1].window(first, count), qkv[2].window(first, count)));
    must(sequences[i].attend(layer, qkv[0].window(first, count), out[i].window(0, count)));
  }
  for (size_t i = 0; i < out[0].values.size(); ++i) {
    const double plain = out[0].values[i];
    const double error = out[1].values[i] - plain;
    sums.error += error * error;
    sums.reference += plain * plain;
  }
}

int run(const std::vector<std::string>& argv) {
  Arguments arguments = parse_arguments(argv);
  const SafetensorsFile file = must(SafetensorsFile::open(arguments.dump));
  std::vector<std::array<Rows, 3>> layers;
  while (file.tensors().contains("k." + std::to_string(layers.size()))) {
    const std::string number = std::to_string(layers.size());
    layers.push_back({read_rows(file, "q." + number), read_rows(file, "k." + number),
                      read_rows(file, "v." + number)});
  }
  LARDER_CHECK(!layers.empty(), arguments.dump, "has no tensor k.0");
  const std::vector<int64_t>& keys = layers[0][1].shape;
  const int64_t windows = keys[0] / arguments.context;
  LARDER_CHECK(windows > 0, "fewer tokens than CONTEXT", keys[0], arguments.context);

  AttentionGeometry& geometry = arguments.group.geometry;
  geometry.num_layers = static_cast<int32_t>(layers.size());
  geometry.num_kv_heads = static_cast<int32_t>(keys[1]);
  geometry.block_tokens = 16;
  geometry.k_dim = static_cast<int32_t>(keys[2]);
  geometry.v_dim = static_cast<int32_t>(layers[0][2].shape[2]);
  arguments.group.num_blocks = arguments.context / 16 + 1;
  GroupOptions plain = arguments.group;
  plain.geometry.k_format = plain.geometry.v_format = KvFormat::kBf16;
  plain.encoder = Encoder::kReference;
  plain.key_transform = KeyTransform::kNone;
  if (!arguments.offsets.empty())
    arguments.group.key_offsets = must(read_key_offsets(arguments.offsets, geometry));

  Client client = must(Client::connect({.socket_path = arguments.socket}));
  std::array<Pool, 2> pools = {
      must(client.open_pool(pool_options("attention-error-bf16", arguments, plain))),
      must(client.open_pool(pool_options("attention-error", arguments, arguments.group)))};
  std::vector<Sums> sums(layers.size());
  for (int64_t window = 0; window < windows; ++window) {
    std::array<Sequence, 2> sequences = {pools[0].begin_sequence(), pools[1].begin_sequence()};
    for (Sequence& sequence : sequences) must(sequence.extend(arguments.context));
    for (size_t layer = 0; layer < layers.size(); ++layer)
      attend_both(sequences, static_cast<int32_t>(layer), layers[layer], window * arguments.context,
                  arguments.context, sums[layer]);
    for (Sequence& sequence : sequences) must(sequence.end());
  }
  Sums all;
  json each = json::array();
  for (const Sums& layer : sums) {
    each.push_back(std::sqrt(layer.error / layer.reference));
    all.error += layer.error;
    all.reference += layer.reference;
  }
  const json result = {{"rel_l2", std::sqrt(all.error / all.reference)},
                       {"rel_l2_each_layer", each},
                       {"windows", windows},
                       {"pool_on", pools[1].device()}};
  std::puts(result.dump().c_str());
  return 0;
}

}  // namespace
}  // namespace larder::test

int main(int argc, char** argv) {
  try {
    return larder::test::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_error: %s\n", error.what());
    return 1;
  }
}
