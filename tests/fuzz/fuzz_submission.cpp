// Any record, with any bytes in the arena behind it, on groups of every kind: it is run or refused,
// reads and writes nothing outside of the arena's data and the group, and never changes a block
// that is not open in the session.
//
// An input is one byte that picks the group, a Submission, and the arena's data from its start.
#include <algorithm>
#include <cstring>
#include <memory>

#include "allocator/extent.h"
#include "allocator/host_memory.h"
#include "allocator/owner_word.h"
#include "client/group_view.h"
#include "daemon/submission.h"
#include "larder/check.h"
#include "tests/fuzz/fuzz.h"
#include "tests/protocol/arena_memory.h"

namespace larder::fuzz {
namespace {

using namespace protocol;

constexpr SessionId kSession{7};
constexpr int64_t kNumBlocks = 6;  // 0 and 1 open here, 2 open elsewhere, 3 published, 4 and 5 free
constexpr int32_t kBlockTokens = 4;
constexpr size_t kDataBytes = 96 * 1024;

GroupSpec attention_spec() {
  AttentionGroup group{2,  2,     32, 16, "nvfp4", "fp8_e4m3", "best_scale", "centred_rotated",
                       {}, {2.0}, -1, {}};
  group.key_offsets = std::vector<float>(2 * 2 * 32, 0.25f);
  return {"g", kBlockTokens, kNumBlocks, 0, "BLHNC", false, {}, group};
}

std::vector<GroupSpec> specs() {
  return {attention_spec(),
          {"g", kBlockTokens, kNumBlocks, 0, "LBHNC", false, {}, MlaGroup{1, "nvfp4_ds_mla", {}}},
          {"g", kBlockTokens, kNumBlocks, 0, "BLHNC", false, {}, MlaGroup{2, "fp8_mla", {0.5}}},
          {"g", kBlockTokens, kNumBlocks, 0, "BLHNC", false, {}, OpaqueGroup{100}}};
}

daemon::MappedGroup make_group(const GroupSpec& spec) {
  GroupView view = view_group(spec).value();
  const larder::GroupLayout machine =
      lay_out_group(GroupSize{.block_bytes = block_bytes(view),
                              .num_blocks = spec.num_blocks,
                              .one_segment = view.layout == KvLayout::kLbhnc})
          .value();
  protocol::GroupLayout layout{
      machine.block_bytes,
      view.layout == KvLayout::kBlhnc ? machine.block_stride_bytes : view.page.page_bytes,
      layer_stride_bytes(view, spec.num_blocks), spec.num_blocks, machine.segment_bytes};
  int64_t total = 0;
  for (const int64_t bytes : layout.segment_bytes) total += bytes;
  std::unique_ptr<AddressRange> memory = HostMemoryProvider().reserve(total);
  int64_t offset = 0;
  for (const int64_t bytes : layout.segment_bytes) {
    memory->map_at(offset, create_host_segment("fuzz", bytes).fd.get(), bytes);
    offset += bytes;
  }
  SharedMapping owners =
      SharedMapping::map(create_host_segment("owners", 4096).fd.get(), 4096, true);
  auto* words = reinterpret_cast<uint64_t*>(owners.data());
  words[0] = words[1] = owner_word(OwnerState::kOpen, kSession);
  words[2] = owner_word(OwnerState::kOpen, SessionId{8});
  words[3] = owner_word(OwnerState::kPublished);
  return {std::move(view), std::move(layout), std::move(memory), std::move(owners)};
}

// What must not change: the layers of blocks 2 to 5.
std::vector<std::byte> others_bytes(const daemon::MappedGroup& group) {
  const kernels::BlocksView view = view_blocks(group.view, group.layout, group.memory->base());
  std::vector<std::byte> bytes;
  for (int64_t block = 2; block < kNumBlocks; ++block)
    for (int64_t layer = 0; layer < view.num_layers; ++layer) {
      const std::byte* page =
          view.base + block * view.block_stride_bytes + layer * view.layer_stride_bytes;
      bytes.insert(bytes.end(), page, page + view.layer_bytes);
    }
  return bytes;
}

struct World {
  World() {
    for (const GroupSpec& spec : specs()) {
      groups.push_back(make_group(spec));
      before.push_back(others_bytes(groups.back()));
    }
  }
  std::vector<daemon::MappedGroup> groups;
  std::vector<std::vector<std::byte>> before;
  test::ArenaMemory memory;
};

World& world() {
  static World the_world;  // kept from input to input: an input is fast
  return the_world;
}

TensorRecord tensor(Dtype dtype, uint64_t offset, int64_t rows, int64_t heads, int64_t dim) {
  return {0,
          static_cast<uint32_t>(dtype),
          kArenaDataOffset + offset,
          {rows, heads, dim},
          {heads * dim, dim, 1}};
}

ArenaArray array(uint64_t offset, uint64_t count) { return {kArenaDataOffset + offset, count}; }

// Tables that every record of the corpus uses, at the start of the data.
constexpr uint64_t kSlots = 0, kLens = 64, kTable = 128, kFloats = 192, kMask = 256, kTensors = 512;

Input make_input(uint8_t group, const Submission& record) {
  Input input(1 + sizeof record + kTensors + 4096, 0);
  input[0] = group;
  std::memcpy(input.data() + 1, &record, sizeof record);
  uint8_t* data = input.data() + 1 + sizeof record;
  const int64_t slots[] = {0, 5, -1, 7};
  const int32_t lens[] = {2, 7};
  const int32_t table[] = {0, 1, 3, 0};
  const float floats[] = {0.5f, 1.0f, -1.0f, 2.0f};
  const int64_t offsets[] = {0, 1};
  std::memcpy(data + kSlots, slots, sizeof slots);
  std::memcpy(data + kLens, lens, sizeof lens);
  std::memcpy(data + kTable, table, sizeof table);
  std::memcpy(data + kFloats, floats, sizeof floats);
  std::memcpy(data + kMask, offsets, sizeof offsets);
  std::memset(data + kMask + 32, 0xB5, 64);
  for (size_t i = kTensors; i < kTensors + 4096; ++i) data[i] = static_cast<uint8_t>(i * 37 & 0x3F);
  return input;
}

Submission attend_record(Op op, int64_t heads, int64_t k_dim, int64_t v_dim) {
  Submission record;
  record.op = static_cast<uint32_t>(op);
  record.scale = 0.25f;
  record.out_scale = record.out_sf_scale = 1.0f;
  record.flags = kFlagCausal;
  record.first = tensor(Dtype::kFp32, kTensors, 2, heads, k_dim);
  record.second = tensor(Dtype::kFp32, kTensors + 16384, 2, heads, v_dim);
  record.lse = array(kTensors + 40960, static_cast<uint64_t>(2 * heads));
  if (op == Op::kAttend) {
    record.q_lens = array(kLens, 1);
    record.seq_lens = array(kLens + 4, 1);
    record.block_table = array(kTable, 2);
    record.block_table_stride = 2;
  } else {
    record.indices = array(kTable, 4);
  }
  return record;
}

}  // namespace

const size_t kMaxInputBytes = 1 + sizeof(Submission) + kDataBytes;

std::vector<Input> corpus(std::mt19937_64&) {
  std::vector<Input> inputs;
  Submission rows;
  rows.op = static_cast<uint32_t>(Op::kAppend);
  rows.slots = array(kSlots, 4);
  rows.first = tensor(Dtype::kFp32, kTensors, 4, 2, 32);
  rows.second = tensor(Dtype::kBf16, kTensors, 4, 2, 16);
  inputs.push_back(make_input(0, rows));
  rows.op = static_cast<uint32_t>(Op::kGather);
  inputs.push_back(make_input(0, rows));
  rows.first = tensor(Dtype::kFp8E4m3, kTensors, 4, 1, 576);
  rows.second = tensor(Dtype::kFp32, kTensors, 0, 1, 512);
  inputs.push_back(make_input(1, rows));
  rows.op = static_cast<uint32_t>(Op::kAppend);
  rows.first = tensor(Dtype::kBf16, kTensors, 4, 1, 512);
  rows.second = tensor(Dtype::kBf16, kTensors, 4, 1, 64);
  inputs.push_back(make_input(2, rows));

  Submission attend = attend_record(Op::kAttend, 4, 32, 16);
  inputs.push_back(make_input(0, attend));
  attend.sinks = array(kFloats, 4);
  attend.mask_offsets = array(kMask, 1);
  attend.mask = array(kMask + 32, 64);
  attend.num_splits = 3;
  attend.soft_cap = 2.0f;
  attend.window_left = 3;
  inputs.push_back(make_input(0, attend));
  Submission spread = attend;
  spread.flags |= kFlagDeterministic;
  spread.shard = {2, 1, 2};
  inputs.push_back(make_input(0, spread));
  spread.shared_prefix_tokens = -1;
  spread.shard = {};
  inputs.push_back(make_input(0, spread));
  attend.second = tensor(Dtype::kE2m1x2, kTensors + 16384, 2, 4, 8);
  attend.out_sf = array(kTensors + 8192, 128 * 4);
  inputs.push_back(make_input(0, attend));
  inputs.push_back(make_input(1, attend_record(Op::kAttend, 2, 576, 512)));
  inputs.push_back(make_input(2, attend_record(Op::kSparseAttend, 2, 576, 512)));

  for (uint8_t group = 0; group < 4; ++group)
    for (const Op op : {Op::kReadPages, Op::kWritePages, Op::kScrub, Op::kChecksum}) {
      Submission blocks;
      blocks.op = static_cast<uint32_t>(op);
      blocks.blocks = array(kTable, 2);
      const auto page = static_cast<uint64_t>(world().groups[group].view.page.page_bytes);
      blocks.bytes = array(kTensors, op == Op::kChecksum ? 2 : 2 * page);
      inputs.push_back(make_input(group, blocks));
    }
  return inputs;
}

}  // namespace larder::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace larder;
  fuzz::World& world = fuzz::world();
  if (size < 1 + sizeof(protocol::Submission)) return 0;
  const size_t index = data[0] % world.groups.size();
  const daemon::MappedGroup& group = world.groups[index];
  protocol::Submission record;
  std::memcpy(&record, data + 1, sizeof record);
  const size_t rest = std::min(size - 1 - sizeof record, fuzz::kDataBytes);
  std::byte* target = world.memory.bytes().data() + protocol::kArenaDataOffset;
  if (rest > 0) std::memcpy(target, data + 1 + sizeof record, rest);
  (void)daemon::run_submission(record, world.memory.arena(), group, fuzz::kSession);
  LARDER_CHECK(fuzz::others_bytes(group) == world.before[index], index, record.op);
  return 0;
}
