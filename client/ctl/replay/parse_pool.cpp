#include <algorithm>
#include <array>

#include "client/ctl/replay/step_parser.h"

namespace larder::replay {
namespace {

constexpr size_t kMaxScales = 8192;
constexpr size_t kMaxGroups = 64;

// The value with that name. One that this build does not have makes the pool unsupported, which is
// for the step to say and not for the file.
template <typename Enum, size_t kCount>
void parse_name(Fields& fields, const std::string& key,
                const std::array<std::string_view, kCount>& names, Enum& to,
                std::string& unsupported) {
  const auto found = fields.find(key);
  if (!found) return;
  const std::string text = found->text();
  const auto name = std::find(names.begin(), names.end(), text);
  if (name != names.end()) {
    to = static_cast<Enum>(name - names.begin());
  } else if (unsupported.empty()) {
    unsupported = key + " is " + shown(json(text)) + ", this build serves " +
                  one_of({names.begin(), names.end()});
  }
}

std::vector<double> parse_scales(Fields& fields, const std::string& key) {
  const auto found = fields.find(key);
  if (!found) return {};
  if (found->value().is_array()) return found->numbers(kMaxScales);
  return {found->number()};
}

// What parse_group fills in.
struct GroupParts {
  GroupOptions& options;
  KeyOffsets& key_offsets;
  std::string& unsupported;
};

void parse_formats(Fields& fields, GroupParts& group) {
  AttentionGeometry& geometry = group.options.geometry;
  if (const auto both = fields.find("format")) {
    parse_name(fields, "format", kKvFormatNames, geometry.k_format, group.unsupported);
    geometry.v_format = geometry.k_format;
    for (const char* key : {"k_format", "v_format"})
      if (const auto one = fields.find(key)) one->refuse("stands beside \"format\", expected one");
    return;
  }
  parse_name(fields, "k_format", kKvFormatNames, geometry.k_format, group.unsupported);
  parse_name(fields, "v_format", kKvFormatNames, geometry.v_format, group.unsupported);
}

void parse_key_offset(StepParser& parser, Fields& fields, GroupParts& group) {
  const auto found = fields.find("key_offset");
  if (!found) return;
  const json& value = found->value();
  if (value.is_object() && value.contains("file")) {
    Fields inner(*found);
    const Cursor file = inner.need("file");
    inner.finish();
    const std::string text = file.text();
    if (text.find('\0') != std::string::npos) file.refuse("has a zero byte");
    group.key_offsets.file = (parser.folder / text).string();
    return;
  }
  if (value.is_object()) {
    group.key_offsets.tensor = parse_tensor(*found, 3, Dtype::kFp32);
    return;
  }
  const AttentionGeometry& geometry = group.options.geometry;
  TensorSpec spec;
  spec.dtype = Dtype::kFp32;
  Listed listed{found->numbers(static_cast<size_t>(kMaxTensorElements))};
  spec.shape = {static_cast<int64_t>(listed.values.size()), 1, 1};
  const int64_t wanted = int64_t{geometry.num_layers} * geometry.num_kv_heads;
  if (wanted > 0 && wanted < kMaxTensorElements &&
      wanted * geometry.k_dim != static_cast<int64_t>(listed.values.size()))
    found->refuse("has " + std::to_string(listed.values.size()) +
                  " numbers, layers, kv_heads and k_dim need " +
                  std::to_string(wanted * geometry.k_dim));
  spec.source = std::move(listed);
  group.key_offsets.tensor = std::move(spec);
}

void parse_attention(StepParser& parser, Fields& fields, GroupParts& group) {
  AttentionGeometry& geometry = group.options.geometry;
  geometry.num_layers = fields.int32("layers", 1);
  geometry.num_kv_heads = fields.need("kv_heads").int32();
  geometry.k_dim = fields.need("k_dim").int32();
  geometry.v_dim = fields.need("v_dim").int32();
  parse_formats(fields, group);
  parse_name(fields, "encoder", kEncoderNames, group.options.encoder, group.unsupported);
  parse_name(fields, "key_transform", kKeyTransformNames, group.options.key_transform,
             group.unsupported);
  parse_key_offset(parser, fields, group);
  group.options.window_tokens = fields.int32("window", -1);
}

void parse_mla(Fields& fields, GroupParts& group, int32_t block_tokens) {
  MlaRow row = MlaRow::kNone;
  (void)fields.need("row_format");
  parse_name(fields, "row_format", kMlaRowNames, row, group.unsupported);
  if (row == MlaRow::kNone && group.unsupported.empty())
    group.unsupported = "row_format is \"none\", which is no row of MLA";
  group.options.geometry = mla_geometry(fields.int32("layers", 1), block_tokens, row);
}

void parse_group(StepParser& parser, Fields& fields, GroupParts group) {
  GroupOptions& options = group.options;
  const size_t kind = fields.choice("kind", {"attention", "mla", "opaque"});
  const int32_t block_tokens = fields.int32("block_tokens", 16);
  options.num_blocks =
      fields.need("num_blocks")
          .integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  options.max_blocks = fields.integer("max_blocks", 0);
  options.segment_bytes = fields.integer("segment_bytes", 0);
  options.geometry.block_tokens = block_tokens;
  if (kind == 0) parse_attention(parser, fields, group);
  if (kind == 1) parse_mla(fields, group, block_tokens);
  if (kind == 2) {
    const Cursor bytes = fields.need("block_bytes");
    options.opaque_block_bytes = bytes.integer(1, std::numeric_limits<int64_t>::max());
  } else {
    options.k_scales = parse_scales(fields, "k_scale");
    options.v_scales = parse_scales(fields, "v_scale");
  }
  parse_name(fields, "layout", kKvLayoutNames, options.layout, group.unsupported);
  options.reserve_block_zero = fields.boolean("reserve_block_zero", false);
}

// A group's name stands beside other parts of results, and beside the checks of expectations.
void check_group_name(const Cursor& name, const std::set<std::string>& taken) {
  static const std::set<std::string> kWords = {
      "key",   "hit_tokens", "error",        "mentions", "near",     "atol",  "rtol",
      "equal", "rel_l2",     "same_as",      "at_most",  "at_least", "block", "blocks",
      "of",    "unique",     "differs_from", "gpu_atol", ""};
  const std::string text = name.text();
  if (taken.contains(text)) name.refuse("is " + shown(json(text)) + ", as of another group");
  if (kWords.contains(text))
    name.refuse("is " + shown(json(text)) + ", a word that results and expectations have");
}

void parse_groups(StepParser& parser, const Cursor& groups, OpenPool& pool) {
  const size_t count = groups.list_size(kMaxGroups);
  if (count == 0) return groups.expected("a list with one group or more");
  pool.options.more_groups.resize(count - 1);
  pool.key_offsets.resize(count);
  std::set<std::string> names;
  for (size_t i = 0; i < count; ++i) {
    Fields inner(groups.at(i));
    GroupOptions& options = i == 0 ? pool.options : pool.options.more_groups[i - 1];
    const Cursor name = inner.need("name");
    check_group_name(name, names);
    options.group_name = name.text();
    names.insert(options.group_name);
    parse_group(parser, inner, {options, pool.key_offsets[i], pool.unsupported});
    inner.finish();
  }
}

}  // namespace

OpenPool parse_open_pool(StepParser& parser) {
  OpenPool pool;
  pool.options.name = parser.step.pool;
  pool.options.model = parser.fields.text("model", "replay");
  if (const auto groups = parser.fields.find("groups")) {
    parse_groups(parser, *groups, pool);
  } else {
    pool.key_offsets.resize(1);
    parse_group(parser, parser.fields, {pool.options, pool.key_offsets[0], pool.unsupported});
  }
  return pool;
}

}  // namespace larder::replay
