// Private to client: what Client, Pool and Sequence share.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/memory_devices.h"
#include "client/group_memory.h"
#include "client/group_view.h"
#include "client/request_ring.h"
#include "client/session.h"
#include "kernels/run_on.h"
#include "larder/client.h"

namespace larder {

struct OpenedPool;

struct Client::Impl {
  ClientOptions options;
  std::optional<RequestRing> ring;  // absent when options.arena_bytes is 0
  // How many Pools there are of each id. The daemon counts a session once: the last one closes.
  std::map<uint64_t, int> num_open = {};
  MemoryDevices devices = MemoryDevices();
  std::map<uint64_t, MemoryImport> imports = {};
  std::string ring_device = kHostDevice;  // whose executor serves the ring
  // Of order_after: words in the arena that a stream writes. The registration goes first.
  std::unique_ptr<kernels::DeviceCalls> ordering = {};
  kernels::RegisteredMemory ordered_arena = {};
  void* ordered_stream = nullptr;
  uint64_t last_point = 0;  // of the stream, that a call waits for
  GroupMemories memories;
  std::unique_ptr<Session> session;  // its thread uses what is above

  std::chrono::steady_clock::time_point deadline() const {
    return std::chrono::steady_clock::now() + options.deadline;
  }
  // Forgets what was staged in the arena: where the session has ended, says so.
  Status start_ring(std::chrono::steady_clock::time_point deadline);
  // Token ids inline where they fit, else through the arena.
  Result<protocol::TokenList> token_list(std::span<const int32_t> tokens);
  Status take_in(OpenedPool& pool, void* stream);
  // The record of a dense tensor's rows in an import, if they lie in one whole.
  std::optional<std::pair<protocol::TensorRecord, uint32_t>> find_import(const TensorView& tensor,
                                                                         int64_t first,
                                                                         int64_t count) const;
  // INVALID_ARGUMENT for a tensor in an import that is memory of a GPU: the CPU cannot copy it.
  Status check_copied(const TensorView& tensor) const;
  // An input in an import, or copied into the arena; an output in an import, or room in the arena.
  Result<protocol::TensorRecord> place_input(protocol::Submission& record,
                                             protocol::ImportPlace place, const TensorView& tensor,
                                             int64_t first, int64_t count);
  Result<protocol::TensorRecord> place_output(protocol::Submission& record,
                                              protocol::ImportPlace place,
                                              const TensorView& tensor);
  // Submits after what is in the stream, and waits.
  Status run(protocol::Submission record, std::chrono::steady_clock::time_point deadline);
  // Key offsets stay in their groups where they fit, else go to the arena.
  Status stage_key_offsets(protocol::PoolSpec& spec);
};

// One group of an open pool: what a Pool is a view of.
struct Pool::Impl {
  OpenedPool& opened;  // that this is part of
  Client::Impl* client;
  uint64_t id;  // of the pool
  bool created;
  Execution execution;
  uint32_t group;
  GroupView view;
  protocol::GroupLayout layout;
  GroupMemory memory;
  bool maps_memory = false;  // from when it is needed here: what replies name is mapped
  // Of memory of a GPU, where kernels run here.
  kernels::DeviceCalls* calls = nullptr;
  kernels::DeviceArray key_offsets = {};
  bool has_stream = false;  // of the engine: calls are enqueued in it

  Impl(OpenedPool& opened_pool, bool was_created, Execution where, uint32_t group_index,
       GroupView group_view, protocol::GroupLayout group_layout);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<std::vector<BlockHandle>> allocate(int64_t num_blocks);
  Status release(std::span<const BlockHandle> blocks,
                 Session::Patience patience = Session::Patience::kCall);
  // blocks[0] is block `first_block` of the token list; those before are published.
  Result<std::vector<PublishedBlock>> publish(int64_t first_block, std::span<const int32_t> tokens,
                                              std::span<const BlockHandle> blocks,
                                              const std::string& adapter,
                                              std::span<const std::string> extra);
  Result<Prefix> lookup(std::span<const int32_t> tokens, bool hold, const std::string& adapter,
                        std::span<const std::string> extra);
  Status copy(std::span<const BlockHandle> from, std::span<const BlockHandle> to);
  Status append(int32_t layer, const TensorView& k, const TensorView& v,
                std::span<const int64_t> slots, const AppendOptions& options = {});
  Status attend(int32_t layer, const AttendBatch& batch, const AttendOptions& options);
  Status read_pages(int32_t layer, std::span<const int32_t> blocks, std::span<std::byte> bytes);
  Status write_pages(int32_t layer, std::span<const int32_t> blocks,
                     std::span<const std::byte> bytes);
  Status move_blocks(std::span<const int32_t> blocks, std::byte* bytes, size_t num_bytes,
                     bool to_pool);
  Status convert_pages(int32_t layer, std::span<const int32_t> blocks, const PagedKv& paged,
                       bool to_pool);

  // All segments that are there.
  Status map_memory();
  // Those that the blocks lie in, if the pool's memory is mapped here at all. `held`: the session
  // holds the blocks, so their segments must be there. RESOURCE_EXHAUSTED where this process has no
  // room for a mapping.
  Status map_blocks(std::span<const protocol::Block> blocks, bool held);
  Status map_segments(std::vector<uint32_t> wanted, bool must_be_there);
  // Kernels here must not read what is not mapped: INVALID_ARGUMENT for an id whose segment is not
  // there. What is out of range, or not used by the call, is not looked at.
  Status check_mapped(const char* field, std::span<const int32_t> blocks) const;
  template <typename Slot>
  Status check_mapped_slots(const char* field, std::span<const Slot> slots) const;
  Status check_mapped_table(std::span<const int32_t> seq_lens, std::span<const int32_t> table,
                            int64_t stride, std::span<const int32_t> first_tokens = {},
                            const ContextShard& shard = {}) const;

  // Runs a call here, and waits for it unless the engine has named a stream of its own.
  template <typename Params>
  Status run_here(const Params& params) const {
    const Status status = kernels::run_on(calls, params);
    return status.ok() && calls != nullptr && !has_stream ? calls->wait() : status;
  }
  Status prepare_calls(bool in_stream);
  // A call in a stream of the engine needs a GPU pool in process; and `layer` in range.
  Status check_stream_call(const char* call, int32_t layer) const;
  kernels::LayerView layer(int32_t index) const;
  std::byte* page(int32_t layer, int32_t block) const;
  // In range, and with K and V: UNSUPPORTED for an opaque pool. All operations begin with this or
  // with check_pages: they also say when the session has ended.
  Status check_layer(int32_t index) const;
  Status check_pages(int32_t layer, std::span<const int32_t> blocks, size_t num_bytes) const;
  Status check_blocks(std::span<const int32_t> blocks, size_t num_bytes) const;
  // `what`: "pages", of so many bytes each.
  Status check_ids(std::span<const int32_t> blocks, size_t num_bytes, const char* what,
                   int64_t bytes_of_each) const;
  Result<float> scale_of(const AttendOptions& options) const;

  // The executor's side of a call that has been validated.
  Status append_on_request(int32_t layer, const kernels::AppendParams& params);
  Status gather_on_request(int32_t layer, const kernels::GatherParams& params,
                           std::span<const int64_t> slots);
  Status attend_on_request(int32_t layer, const kernels::AttendParams& params);
  Status sparse_on_request(int32_t layer, const kernels::SparseMlaParams& params);
  void fill_output(protocol::Submission& record, const kernels::AttentionOutput& output) const;
  Status reserve_output(protocol::Submission& record, const kernels::AttentionOutput& output);
  void copy_output(const protocol::Submission& record,
                   const kernels::AttentionOutput& output) const;
  template <typename Before, typename After>
  Status in_block_portions(protocol::Op op, int32_t layer, std::span<const int32_t> blocks,
                           int64_t bytes_of_a_block, Before before, After after);
  protocol::Submission submission(protocol::Op op, int32_t layer) const;
  int64_t rows_that_fit(int64_t bytes_of_a_row) const;  // in the arena, at least 1
};

// What the Pools of one open_pool share; closes the pool with the last of them.
struct OpenedPool {
  Client::Impl* client;  // outlives the pool
  uint64_t id;
  std::string device = kHostDevice;                  // whose memory it is
  std::unique_ptr<kernels::DeviceCalls> calls = {};  // in process on a GPU; outlives the groups
  int64_t unit_tokens = 0;                           // see Pool::unit_tokens
  std::vector<size_t> per_unit = {};                 // blocks of each group in one unit
  std::vector<std::unique_ptr<Pool::Impl>> groups = {};

  OpenedPool(Client::Impl* owner, uint64_t pool_id);
  ~OpenedPool();
  OpenedPool(const OpenedPool&) = delete;
  OpenedPool& operator=(const OpenedPool&) = delete;
};

// INVALID_ARGUMENT unless the table has a row of `stride` entries for each sequence.
Status check_table(int64_t num_seqs, std::span<const int32_t> table, int64_t stride);

// Calls `part(first, count)` with portions of a list that is too long for one message; once, with
// none, for an empty list.
template <typename Call>
Status in_portions(size_t total, size_t portion, Call part) {
  for (size_t first = 0; first < total || first == 0; first += portion) {
    if (Status status = part(first, std::min(portion, total - first)); !status.ok()) return status;
    if (total == 0) break;
  }
  return {};
}

protocol::Block to_wire(const BlockHandle& block);
std::vector<protocol::Block> to_wire(std::span<const BlockHandle> blocks);
BlockHandle from_wire(const protocol::Block& block);

}  // namespace larder
