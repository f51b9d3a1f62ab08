// The steps of a replay file, typed. What each field means is in tests/cases/README.md.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "client/ctl/replay/expectation.h"
#include "client/ctl/replay/tensor_spec.h"
#include "larder/client.h"

namespace larder::replay {

// Blocks: whole results, single blocks of results, and plain ids.
struct BlockItem {
  std::string result;  // empty: `id` is meant
  int64_t index = -1;  // of the result's blocks; -1: all of them
  int32_t id = -1;
};
using BlockList = std::vector<BlockItem>;
struct SlotItem {
  std::string result;  // empty: `number` is the slot, else an offset in block `index` of the result
  int64_t index = 0;
  int64_t number = 0;
};
struct SlotRange {
  BlockList blocks;
  int64_t from = 0;
  int64_t count = 0;
};
using SlotList = std::variant<std::vector<SlotItem>, SlotRange>;
// Digits, or the bytes of an earlier result.
using HexSource = std::variant<ByteString, std::string>;

struct OpenSession {
  std::string tenant = "default";
  bool is_process = false;
};
struct KillSession {};
struct KeyOffsets {
  std::optional<TensorSpec> tensor;
  std::string file;
};
struct OpenPool {
  PoolOptions options;                  // execution and key_offsets are filled in when it is opened
  std::string unsupported;              // not empty: why this build has no such pool
  std::vector<KeyOffsets> key_offsets;  // of each group
};
struct ClosePool {};
struct Alloc {
  int64_t num_blocks = 0;
};
struct Release {
  BlockList blocks;
};
struct Append {
  int32_t layer = 0;
  TensorSpec k;  // mla: the latent
  TensorSpec v;  // mla: the rope part
  SlotList slots;
};
struct Read {
  int32_t layer = 0;
  bool wants_first = true;  // k or latent; else v or rope
  bool is_mla_word = false;
  SlotList slots;
};
struct SequenceTable {
  std::vector<BlockList> block_table;
  std::vector<int32_t> seq_lens;
};
struct Gather {
  int32_t layer = 0;
  SequenceTable table;
  Dtype dtype = Dtype::kBf16;  // kFp8E4m3: the staging rows "fp8_mla"
};
struct AttendFields {
  TensorSpec q;
  float scale = 0;
  bool causal = true;
  int32_t window_left = -1;
  float soft_cap = 0;
  std::vector<float> sinks;
  std::vector<float> alibi_slopes;
  bool partial = false;
  int32_t splits = 0;
  bool deterministic = false;
  int32_t shared_prefix_tokens = 0;
  ContextShard shard;
  Dtype out_dtype = Dtype::kFp32;
  double out_fill = std::numeric_limits<double>::quiet_NaN();
};
struct Attend {
  int32_t layer = 0;
  AttendFields fields;
  SequenceTable table;
  std::vector<int32_t> q_lens;
  std::vector<uint8_t> mask;  // packed bits
  std::vector<int64_t> mask_offsets;
};
struct SparseMla {
  int32_t layer = 0;
  TensorSpec q;
  std::vector<int32_t> indices;
  int64_t top_k = 0;
  std::vector<int32_t> topk_lens;
  float scale = 0;
  std::vector<float> sinks;
  double out_fill = std::numeric_limits<double>::quiet_NaN();
};
struct MergeState {
  std::string result;  // empty: out and lse are given
  TensorSpec out;
  std::vector<float> lse;
};
struct Merge {
  std::vector<MergeState> states;
  std::vector<float> sinks;
};
struct Publish {
  BlockList blocks;  // of a pool with one group
  std::map<std::string, BlockList> group_blocks;
  std::vector<int32_t> tokens;
  std::string adapter;
  std::vector<std::string> extra;
};
struct Lookup {
  std::vector<int32_t> tokens;
  std::string adapter;
  std::vector<std::string> extra;
  bool hold = true;
};
struct Copy {
  BlockList from;
  BlockList to;
};
struct Scrub {
  BlockList blocks;
};
struct Checksum {
  BlockList blocks;
};
enum class Region : uint8_t { kAll, kKData, kKScale, kVData, kVScale, kRow };
// `bytes`, and `poke` where there is something to write.
struct RawBytes {
  int32_t layer = 0;
  Region region = Region::kAll;
  std::variant<BlockList, SlotList> where;
  std::optional<std::variant<uint8_t, HexSource>> written;
};
struct MovePages {
  bool is_import = false;
  int32_t layer = 0;
  BlockList blocks;
  PageOrder order = PageOrder::kNhd;
  VScaleOrder v_scale_order = VScaleOrder::kLinear;
  int32_t block_tokens = 0;  // 0: the pool's
  HexSource hex;             // import
};
enum class SequenceOp : uint8_t { kBegin, kAppend, kFork, kTruncate, kAttend, kPublish, kEnd };
struct SequenceStep {
  SequenceOp op = SequenceOp::kBegin;
  std::string name;
  std::optional<int32_t> layer;
  std::vector<int32_t> tokens;
  std::string adapter;
  std::optional<TensorSpec> k;
  std::optional<TensorSpec> v;
  AttendFields attend;
  std::string to;
  int64_t length = 0;
};
struct Stats {
  std::string tenant;  // empty: figures of the pool alone
};
struct Wait {
  Stats stats;
  Expectation until;
  int64_t limit_ms = 5000;
};
struct RestartDaemon {
  bool is_kill = true;  // else SIGTERM
};
struct KillExecutor {};
struct KillKeeper {};
// `grow` and `shrink`: to so many blocks.
struct Resize {
  int64_t num_blocks = 0;
};
struct Evict {
  int64_t num_blocks = 0;
};
struct Quota {
  std::string tenant;
  int64_t guaranteed_bytes = 0;
  int64_t maximum_bytes = 0;
};

using Operation = std::variant<OpenSession, KillSession, OpenPool, ClosePool, Alloc, Release,
                               Append, Read, Gather, Attend, SparseMla, Merge, Publish, Lookup,
                               Copy, Scrub, Checksum, RawBytes, MovePages, SequenceStep, Stats,
                               Wait, RestartDaemon, KillExecutor, KillKeeper, Resize, Evict, Quota>;

struct Step {
  size_t number = 0;  // from 1
  std::string op;     // the file's word for it
  std::string session = "main";
  std::string pool;  // empty where the operation has none
  // Of the pool's groups, by index or name, as the file says.
  std::variant<int32_t, std::string> group = 0;
  std::string group_name;  // empty where the pool has one group, and in other processes
  std::string as;          // empty: the result has no name
  bool may_be_unsupported = false;
  std::optional<Expectation> expect;
  Operation operation;
  std::vector<std::string> references;  // results of earlier steps that are needed
  json source;                          // without "expect", for sessions in other processes
};

}  // namespace larder::replay
