// Private to client: what Client, Pool and Sequence share.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/mapped_range.h"
#include "client/control_connection.h"
#include "client/group_view.h"
#include "client/request_ring.h"
#include "larder/client.h"

namespace larder {

struct Client::Impl {
  ClientOptions options;
  ControlConnection control;
  std::optional<RequestRing> ring;  // absent when options.arena_bytes is 0
  // How many Pools there are of each id. The daemon counts a session once: the last one closes.
  std::map<uint64_t, int> num_open = {};

  std::chrono::steady_clock::time_point deadline() const {
    return std::chrono::steady_clock::now() + options.deadline;
  }
  // Token ids inline where they fit, else through the arena.
  Result<protocol::TokenList> token_list(std::span<const int32_t> tokens);
  // Key offsets stay in the group where they fit, else go to the arena.
  Status stage_key_offsets(protocol::GroupSpec& group);
};

struct Pool::Impl {
  Client::Impl* client;  // outlives the pool
  uint64_t id;
  bool created;
  Execution execution;
  GroupView view;
  protocol::GroupLayout layout;
  MappedRange memory;  // empty until it is needed here

  Result<std::vector<BlockHandle>> allocate(int64_t num_blocks);
  Status release(std::span<const BlockHandle> blocks);
  // blocks[0] is block `first_block` of the token list; those before are published.
  Result<std::vector<PublishedBlock>> publish(int64_t first_block, std::span<const int32_t> tokens,
                                              std::span<const BlockHandle> blocks,
                                              const std::string& adapter,
                                              std::span<const std::string> extra);
  Result<Prefix> lookup(std::span<const int32_t> tokens, bool hold, const std::string& adapter,
                        std::span<const std::string> extra);
  Status copy(std::span<const BlockHandle> from, std::span<const BlockHandle> to);
  Status append(int32_t layer, const TensorView& k, const TensorView& v,
                std::span<const int64_t> slots);
  Status attend(int32_t layer, const AttendBatch& batch, const AttendOptions& options);
  Status read_pages(int32_t layer, std::span<const int32_t> blocks, std::span<std::byte> bytes);
  Status write_pages(int32_t layer, std::span<const int32_t> blocks,
                     std::span<const std::byte> bytes);
  Status convert_pages(int32_t layer, std::span<const int32_t> blocks, const PagedKv& paged,
                       bool to_pool);

  Status map_memory();
  kernels::LayerView layer(int32_t index) const;
  std::byte* page(int32_t layer, int32_t block) const;
  // In range, and with K and V: UNSUPPORTED for an opaque pool.
  Status check_layer(int32_t index) const;
  Status check_pages(int32_t layer, std::span<const int32_t> blocks, size_t num_bytes) const;
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

// INVALID_ARGUMENT unless the table has a row of `stride` entries for each sequence.
Status check_table(int64_t num_seqs, std::span<const int32_t> table, int64_t stride);

protocol::Block to_wire(const BlockHandle& block);
std::vector<protocol::Block> to_wire(std::span<const BlockHandle> blocks);
std::vector<BlockHandle> from_wire(const std::vector<protocol::Block>& blocks);

}  // namespace larder
