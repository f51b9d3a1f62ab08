// Any bytes through the parser of replay files: refused with a sentence that names the file, or
// steps within their limits. Nothing is run.
//
// The bytes are taken as a file, and then as edits of a good file: each word picks a value in it
// and what stands there instead.
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "client/ctl/replay/parse.h"
#include "larder/check.h"
#include "tests/fuzz/fuzz.h"

namespace larder::fuzz {
namespace {

constexpr const char* kFiles[] = {
    R"({"name": "a", "version": 1, "steps": [
{"do": "open_pool", "pool": "p", "layers": 1, "kv_heads": 1, "k_dim": 64, "v_dim": 64, "num_blocks": 4,
 "k_format": "bf16", "v_format": "nvfp4", "k_scale": [1, "NaN"], "key_transform": "centred",
 "key_offset": {"shape": [1, 1, 64], "normal": {"seed": 1, "std": 2}}, "window": -1},
{"do": "alloc", "pool": "p", "n": 3, "as": "b", "expect": {"unique": true}},
{"do": "append", "pool": "p", "k": {"shape": [1,1,64], "uniform": {"seed": 1, "low": 0, "high": 1},
 "set": [{"at": [0, null, 3], "to": "inf"}], "strides": [64, 0, 1]},
 "v": {"shape": [1,1,2], "bits": "00112233"}, "slots": [["b", 0, 1], -1]},
{"do": "attend", "pool": "p", "q": {"shape": [1,1,64], "fill": 0}, "block_table": ["b", [["b", 1], 5]],
 "seq_lens": [3, 0], "q_lens": [1, 0], "mask": [[[1, 0, 1]], []], "sinks": [0.5], "as": "o", "deterministic": true,
 "shared_prefix_tokens": -1, "shard": {"ranks": 2, "rank": 1, "interleave": 16},
 "expect": {"out": {"near": 1, "atol": 1e-3, "gpu_atol": 2e-3}, "lse": {"equal": {"of": "b", "times": 2}}}},
{"do": "merge", "states": ["o", {"out": {"shape": [1,1,64], "fill": 0}, "lse": ["-inf"]}]},
{"do": "wait", "pool": "p", "until": {"free": {"at_least": 1}}, "ms": 5}]})",
    R"({"steps": [{"do": "open_session", "session": "s", "tenant": "t", "mode": "process"},
{"do": "open_pool", "pool": "m", "session": "s", "kind": "mla", "row_format": "fp8_mla", "num_blocks": 4},
{"do": "sequence", "pool": "m", "session": "s", "op": "begin", "name": "x", "tokens": {"from": 0, "count": 9}},
{"do": "sequence", "pool": "m", "session": "s", "op": "fork", "name": "x", "to": "y"},
{"do": "sparse_mla", "pool": "m", "session": "s", "q": {"shape": [1,1,576], "fill": 0},
 "indices": [[1, -1]], "topk_lens": [1]},
{"do": "lookup", "pool": "m", "session": "s", "tokens": [1, 2], "extra": ["00"], "as": "hit"},
{"do": "poke", "pool": "m", "session": "s", "blocks": "hit", "what": "row", "byte": 255},
{"do": "import", "pool": "m", "session": "s", "blocks": [1], "layout": "HND", "hex": ""},
{"do": "open_pool", "pool": "g", "groups": [{"name": "a", "kind": "opaque", "block_bytes": 8, "num_blocks": 1},
 {"name": "b", "kv_heads": 1, "k_dim": 64, "v_dim": 64, "num_blocks": 4, "max_blocks": 8, "window": 32}]},
{"do": "alloc", "pool": "g", "n": 3, "group": "b", "as": "gb"},
{"do": "publish", "pool": "g", "blocks": {"a": [-1, 0], "b": "gb"}, "tokens": [1], "expect": {"b": {"same_as": "gb"}}},
{"do": "stats", "tenant": "t", "expect": {"tenant_used_bytes": {"equal": 0}}},
{"do": "quota", "tenant": "t", "guaranteed_bytes": 1, "maximum_bytes": 2},
{"do": "kill_session", "session": "s"}, {"do": "restart_daemon", "how": "term", "may_be_unsupported": true},
{"do": "grow", "pool": "g", "group": 1, "num_blocks": 8, "expect": {"error": "BUSY", "mentions": ["grow"]}}]})"};

const char* const kReplacements[] = {
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "-0.0",
    "1e308",
    "2147483647",
    "2147483648",
    "-2147483649",
    "4294967296",
    "134217728",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "\"\"",
    "\"b\"",
    "\"o\"",
    "\"NaN\"",
    "\"main\"",
    "\"ff\"",
    "[]",
    "{}",
    "[0]",
    "[[[]]]",
    "[\"b\", 0]",
    "[\"b\", 99, 0]",
    "{\"of\": \"b\"}",
    "{\"shape\": [0,1,1], \"fill\": 0}",
    "{\"shape\": [134217728,1,1], \"fill\": 0, \"strides\": [-9223372036854775808,0,0]}"};

void check(std::string_view text) {
  const auto file = replay::parse_replay(text, "case.json");
  if (file.ok()) {
    LARDER_CHECK(!file->steps.empty() && file->steps.size() <= replay::kMaxSteps);
    return;
  }
  LARDER_CHECK(file.status().code() == ErrorCode::kInvalidArgument, file.status().to_string());
  LARDER_CHECK(file.status().message().starts_with("case.json: "), file.status().to_string());
}

void collect(nlohmann::json& value, std::vector<nlohmann::json*>& to) {
  to.push_back(&value);
  for (nlohmann::json& inner : value)
    if (value.is_structured()) collect(inner, to);
}

// A word: which value, and either a replacement or that it is left out.
void edit(nlohmann::json& document, uint64_t word) {
  std::vector<nlohmann::json*> values;
  collect(document, values);
  nlohmann::json& value = *values[word % values.size()];
  const uint64_t choice = (word >> 32) % (std::size(kReplacements) + 4);
  if (choice < std::size(kReplacements)) {
    value = nlohmann::json::parse(kReplacements[choice]);
  } else if (value.is_structured() && !value.empty()) {
    auto gone = value.begin();
    std::advance(gone, static_cast<ptrdiff_t>((word >> 48) % value.size()));
    value.erase(gone);
  }
}

}  // namespace

const size_t kMaxInputBytes = 16 * 1024;

std::vector<Input> corpus(std::mt19937_64& engine) {
  std::vector<Input> inputs;
  for (const std::string_view text : kFiles) inputs.emplace_back(text.begin(), text.end());
  inputs.emplace_back(16'000, uint8_t{'['});
  for (int i = 0; i < 64; ++i) {
    Input& edits = inputs.emplace_back(8 + 8 * (1 + engine() % 8));
    for (uint8_t& byte : edits) byte = static_cast<uint8_t>(engine());
  }
  return inputs;
}

}  // namespace larder::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace larder;
  fuzz::check({reinterpret_cast<const char*>(data), size});
  if (size < 8) return 0;
  auto document = nlohmann::json::parse(fuzz::kFiles[data[0] % std::size(fuzz::kFiles)]);
  for (size_t i = 8; i + 8 <= size && i <= 64; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + i, 8);
    fuzz::edit(document, word);
  }
  fuzz::check(document.dump());
  return 0;
}
