#include "allocator/pool_spec.h"

#include <algorithm>
#include <numeric>

namespace larder {
namespace {

std::string quoted(const std::string& text) { return '"' + text + '"'; }
std::string shown(const std::string& text) { return quoted(text); }
std::string shown(bool flag) { return flag ? "true" : "false"; }
std::string shown(int64_t number) { return std::to_string(number); }
std::string shown(int32_t number) { return std::to_string(number); }
std::string shown(GroupKind kind) {
  constexpr const char* kNames[] = {"full", "window", "state"};
  return kNames[static_cast<int>(kind)];
}

Status differs(const std::string& field, const std::string& pool, const std::string& request) {
  return {ErrorCode::kInvalidArgument,
          field + " is " + pool + " in the pool and " + request + " in the request"};
}

template <typename Value>
Status check_field(const std::string& field, const Value& pool, const Value& request) {
  return pool == request ? Status() : differs(field, shown(pool), shown(request));
}

Status check_same_identity(const Identity& pool, const Identity& request) {
  const size_t num_fields = std::max(pool.size(), request.size());
  for (size_t i = 0; i < num_fields; ++i) {
    if (i >= request.size())
      return differs("identity " + quoted(pool[i].first), quoted(pool[i].second), "absent");
    if (i >= pool.size())
      return differs("identity " + quoted(request[i].first), "absent", quoted(request[i].second));
    if (pool[i].first != request[i].first)
      return differs("the name of identity field " + std::to_string(i), quoted(pool[i].first),
                     quoted(request[i].first));
    if (pool[i].second != request[i].second)
      return differs("identity " + quoted(pool[i].first), quoted(pool[i].second),
                     quoted(request[i].second));
  }
  return {};
}

Status check_same_group(const GroupSpec& pool, const GroupSpec& request) {
  for (const Status& status :
       {check_field("group name", pool.name, request.name),
        check_field("block_bytes", pool.block_bytes, request.block_bytes),
        check_field("num_blocks", pool.num_blocks, request.num_blocks),
        check_field("block_tokens", pool.block_tokens, request.block_tokens),
        check_field("one_segment", pool.one_segment, request.one_segment),
        check_field("reserve_block_zero", pool.reserve_block_zero, request.reserve_block_zero),
        check_field("max_blocks", pool.max_blocks, request.max_blocks),
        check_field("segment_bytes", pool.segment_bytes, request.segment_bytes),
        check_field("kind", pool.kind, request.kind),
        check_field("window_tokens", pool.window_tokens, request.window_tokens)})
    if (!status.ok()) return status;
  return {};
}

Status check_units(const std::vector<GroupSpec>& groups) {
  int64_t blocks = 0;
  for (const GroupSpec& group : groups) blocks += blocks_in_unit(groups, group);
  if (blocks > kMaxUnitBlocks)
    return {ErrorCode::kInvalidArgument, "block_tokens: a unit of " +
                                             std::to_string(unit_tokens(groups)) + " tokens has " +
                                             std::to_string(blocks) + " blocks, at most " +
                                             std::to_string(kMaxUnitBlocks) + " are allowed"};
  return {};
}

}  // namespace

Status check_pool_spec(const PoolSpec& spec) {
  if (spec.name.empty() || spec.name.size() > kMaxPoolNameBytes)
    return {ErrorCode::kInvalidArgument, "name has " + std::to_string(spec.name.size()) +
                                             " bytes, but must have 1 to " +
                                             std::to_string(kMaxPoolNameBytes)};
  if (spec.groups.empty() || spec.groups.size() > kMaxGroupsPerPool)
    return {ErrorCode::kInvalidArgument, "groups has " + std::to_string(spec.groups.size()) +
                                             " entries, but must have 1 to " +
                                             std::to_string(kMaxGroupsPerPool)};
  int64_t tokens = 1;
  for (const GroupSpec& group : spec.groups) {
    if (group.block_tokens < 1)
      return {ErrorCode::kInvalidArgument,
              "block_tokens is " + std::to_string(group.block_tokens) + ", but must be positive"};
    if (group.reserve_block_zero && group.num_blocks == 1)
      return {ErrorCode::kInvalidArgument,
              "num_blocks is 1, but must be at least 2 where block 0 is reserved"};
    if ((group.kind == GroupKind::kWindow) != (group.window_tokens > 0))
      return {ErrorCode::kInvalidArgument, "window_tokens is " +
                                               std::to_string(group.window_tokens) +
                                               ", but the group's kind is " + shown(group.kind)};
    tokens = std::lcm(tokens, int64_t{group.block_tokens});
    if (tokens > INT32_MAX)
      return {ErrorCode::kInvalidArgument,
              "block_tokens is " + std::to_string(group.block_tokens) +
                  ": no unit of fewer than 2^31 tokens has whole blocks of every group"};
  }
  return check_units(spec.groups);
}

int64_t unit_tokens(const std::vector<GroupSpec>& groups) {
  int64_t tokens = 1;
  for (const GroupSpec& group : groups) tokens = std::lcm(tokens, int64_t{group.block_tokens});
  return tokens;
}

int32_t blocks_in_unit(const std::vector<GroupSpec>& groups, const GroupSpec& group) {
  if (group.kind == GroupKind::kState) return 1;
  return static_cast<int32_t>(unit_tokens(groups) / group.block_tokens);
}

Result<GroupLayout> lay_out_group(const GroupSpec& spec) {
  return lay_out_group(GroupSize{spec.block_bytes, spec.num_blocks, spec.max_blocks,
                                 spec.one_segment, spec.segment_bytes});
}

Status check_same_spec(const PoolSpec& pool, const PoolSpec& request) {
  for (const Status& status : {check_field("model", pool.model, request.model),
                               check_same_identity(pool.identity, request.identity)})
    if (!status.ok()) return status;
  if (pool.groups.size() != request.groups.size())
    return differs("the number of groups", std::to_string(pool.groups.size()),
                   std::to_string(request.groups.size()));
  for (size_t i = 0; i < pool.groups.size(); ++i)
    if (Status status = check_same_group(pool.groups[i], request.groups[i]); !status.ok())
      return status;
  return {};
}

}  // namespace larder
