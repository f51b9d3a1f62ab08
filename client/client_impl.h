// Private to client: what Client, Pool and Sequence share.
#pragma once

#include <chrono>
#include <cstdint>
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

  std::chrono::steady_clock::time_point deadline() const {
    return std::chrono::steady_clock::now() + options.deadline;
  }
  // Token ids inline where they fit, else through the arena.
  Result<protocol::TokenList> token_list(std::span<const int32_t> tokens);
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
                                              const std::string& adapter);
  Result<Prefix> lookup(std::span<const int32_t> tokens, bool hold, const std::string& adapter);
  Status append(int32_t layer, const TensorView& k, const TensorView& v,
                std::span<const int64_t> slots);
  Status attend(int32_t layer, const AttendBatch& batch, const AttendOptions& options);

  Status map_memory();
  kernels::LayerView layer(int32_t index) const;
  Status check_layer(int32_t index) const;
  Status append_on_request(int32_t layer, const kernels::AppendParams& params);
  Status attend_on_request(int32_t layer, const kernels::AttendParams& params);
  protocol::Submission submission(protocol::Op op, int32_t layer) const;
};

protocol::Block to_wire(const BlockHandle& block);
std::vector<protocol::Block> to_wire(std::span<const BlockHandle> blocks);
std::vector<BlockHandle> from_wire(const std::vector<protocol::Block>& blocks);

}  // namespace larder
