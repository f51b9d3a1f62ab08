#include "tests/simulation/workload.h"

#include <iterator>

namespace larder::sim {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kBlockBytes = kMiB / 2;
constexpr int64_t kSegmentBytes = 2 * kMiB;  // four blocks

GroupSpec group(int64_t num_blocks, int64_t max_blocks) {
  GroupSpec spec;
  spec.name = "main";
  spec.block_bytes = kBlockBytes;
  spec.num_blocks = num_blocks;
  spec.block_tokens = 2;
  spec.max_blocks = max_blocks;
  spec.segment_bytes = kSegmentBytes;
  return spec;
}

std::vector<GroupSpec> hybrid() {
  std::vector<GroupSpec> groups = {group(8, 24), group(4, 16), group(4, 12)};
  groups[1].name = "window";
  groups[1].kind = GroupKind::kWindow;
  groups[1].window_tokens = 5;
  groups[2].name = "state";
  groups[2].kind = GroupKind::kState;
  groups[2].block_tokens = 4;
  return groups;
}

}  // namespace

Configure configuration() {
  return {96 * kMiB,
          7,
          {{"a", "salt of a", 16 * kMiB, 0},
           {"b", "salt of b", 16 * kMiB, 48 * kMiB},
           {"c", "salt of c", 0, 24 * kMiB}}};
}

PoolSpec pool_of_name(const std::string& name) {
  PoolSpec spec{name, "model@1", {{"format", "nvfp4"}}, {group(8, 0)}};
  if (name == "growing") spec.groups = {group(4, 32)};
  if (name == "hybrid") spec.groups = hybrid();
  if (name == "large") spec.groups = {group(72, 0)};
  if (name == "reserved") {
    spec.groups = {group(8, 16)};
    spec.groups[0].reserve_block_zero = true;
  }
  if (name == "one piece") {
    spec.groups[0].one_segment = true;
    spec.groups[0].segment_bytes = 0;
  }
  return spec;
}

PoolSpec random_pool(Chance& chance) {
  constexpr const char* kNames[] = {"fixed",  "fixed",  "growing",  "growing", "growing",  "hybrid",
                                    "hybrid", "hybrid", "reserved", "large",   "one piece"};
  PoolSpec spec = pool_of_name(kNames[chance.below(std::size(kNames))]);
  if (spec.name == "fixed" && chance.one_in(4)) spec.groups[0].num_blocks = 12;
  if (!chance.one_in(12)) return spec;
  spec.name = "refused";
  if (chance.one_in(2)) {
    spec.groups[0].block_tokens = 0;
  } else {
    spec.groups[0].one_segment = true;
    spec.groups[0].max_blocks = 100;
  }
  return spec;
}

Path random_path(Chance& chance, int max_units) {
  Path path(static_cast<size_t>(chance.below(static_cast<size_t>(max_units) + 1)));
  for (uint8_t& text : path) text = chance.one_in(4) ? static_cast<uint8_t>(chance.below(3)) : 0;
  return path;
}

std::vector<int32_t> tokens_of(const Path& path, int64_t unit_tokens) {
  std::vector<int32_t> tokens;
  for (const uint8_t text : path)
    for (int64_t i = 0; i < unit_tokens; ++i)
      tokens.push_back(text * 1000 + static_cast<int32_t>(i));
  return tokens;
}

Path path_of(const std::vector<int32_t>& tokens, int64_t unit_tokens) {
  Path path;
  for (size_t i = 0; i + static_cast<size_t>(unit_tokens) <= tokens.size();
       i += static_cast<size_t>(unit_tokens))
    path.push_back(static_cast<uint8_t>(tokens[i] / 1000));
  return path;
}

}  // namespace larder::sim
