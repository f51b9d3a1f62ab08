// The client library: connect to a daemon, open a pool, append K and V, attend over them.
//
//     auto client = larder::Client::connect({.socket_path = "/run/larder/larderd.sock"}).value();
//     auto pool = client.open_pool({.name = "kv", .model = "tiny-lm", ...}).value();
//     auto sequence = pool.begin_sequence();
//     sequence.extend(num_tokens);             // room, all layers
//     sequence.append(layer, k, v);            // K and V of those tokens
//     sequence.attend(layer, q, out);          // their attention over the whole sequence
//
// Execution is chosen when a pool is opened: kInProcess maps the pool's memory and runs the kernels
// here; kOnRequest hands the tensors to the daemon's executor through shared memory. Same calls,
// same bytes, same results.
//
// Errors: every call that can be refused returns Status or Result with a code and a sentence; a
// refusal changes nothing and the connection stays usable. UNAVAILABLE means that the daemon is
// gone or that its executor died again and again under the call, DEADLINE_EXCEEDED that it did not
// answer in time. Failures of the operating system in this process throw larder::SystemError. Every
// call has a deadline (ClientOptions::deadline).
//
// Thread rule: a Client, and the pools and sequences made from it, are used by one thread at a
// time. Different clients are independent. A Client outlives its pools, a Pool its sequences.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "larder/attention.h"
#include "larder/kv_format.h"
#include "larder/paged_kv.h"
#include "larder/status.h"
#include "larder/tensor.h"

namespace larder {

enum class Execution : uint8_t { kInProcess, kOnRequest };

struct ClientOptions {
  std::string socket_path = {};  // empty: $LARDER_SOCKET, else /run/larder/larderd.sock
  std::string tenant = "default";
  std::string token = {};       // the tenant's token, where the daemon's configuration has one
  std::string name = "client";  // shown in `larderctl sessions`
  std::chrono::microseconds deadline = std::chrono::seconds(10);  // of every call
  int64_t arena_bytes = int64_t{32} << 20;  // staging for on-request calls, shared with the daemon
};

// A pool stores K and V of attention layers, rows of MLA layers (geometry = mla_geometry(...)), or
// blocks of bytes that only the engine understands (opaque_block_bytes).
struct PoolOptions {
  std::string name = {};   // unique within the tenant; opening an existing pool attaches to it
  std::string model = {};  // model and revision; part of every prefix key
  AttentionGeometry geometry = {};
  Encoder encoder = Encoder::kReference;
  KeyTransform key_transform = KeyTransform::kNone;
  // [num_layers, num_kv_heads, k_dim] for the centred transforms, else empty (larderctl calibrate
  // writes them). Every session that opens the pool states the same.
  std::vector<float> key_offsets = {};
  int64_t opaque_block_bytes = 0;  // > 0: an opaque pool; of geometry, block_tokens alone is used
  KvLayout layout = KvLayout::kBlhnc;
  int64_t num_blocks = 0;
  int64_t max_blocks = 0;           // 0: num_blocks; more is UNSUPPORTED: pools do not grow yet
  int32_t window_tokens = -1;       // other than -1 is UNSUPPORTED: use AttendOptions::window_left
  bool reserve_block_zero = false;  // keep block 0 as a null block
  std::vector<double> k_scales = {};  // empty: 1; one entry: all layers; else one per layer
  std::vector<double> v_scales = {};  // likewise
  Execution execution = Execution::kInProcess;
};

// A block as the daemon names it; plain block ids in tables and slots are BlockHandle::id.
struct BlockHandle {
  int32_t id = -1;
  uint32_t generation = 0;
  bool operator==(const BlockHandle&) const = default;
};

struct PublishedBlock {
  std::array<uint8_t, 32> key;
  BlockHandle block;  // holds the key: the given block, or an older one with the same content
};

struct Prefix {
  int64_t hit_tokens = 0;  // a multiple of block_tokens
  std::vector<BlockHandle> blocks;
};

struct PoolGroupStats {
  std::string name;
  int64_t capacity = 0, free = 0, open = 0, published = 0, cached = 0, quarantined = 0;  // blocks
  int64_t physical_bytes = 0, used_bytes = 0, slack_bytes = 0;
};

class Pool;
class Sequence;

class Client {
 public:
  static Result<Client> connect(ClientOptions options);
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();  // says goodbye: everything the session held is released

  Result<Pool> open_pool(const PoolOptions& options);
  uint64_t session_id() const;
  // Changes when the daemon has restarted.
  uint64_t boot_id() const;

  struct Impl;

 private:
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

class Pool {
 public:
  Pool(Pool&&) noexcept;
  Pool& operator=(Pool&&) noexcept;
  // The last of a Client's Pools of one pool detaches; the pool and its published blocks stay.
  ~Pool();

  const AttentionGeometry& geometry() const;
  Execution execution() const;
  int64_t num_blocks() const;
  bool created() const;  // false: attached to a pool that was there

  // All or nothing; RESOURCE_EXHAUSTED carries requested and available. More than 8192 blocks come
  // in parts: where another session takes some in between, what was got is given back, but prefixes
  // that were evicted for it are gone.
  Result<std::vector<BlockHandle>> allocate(int64_t num_blocks);
  Status release(std::span<const BlockHandle> blocks);
  // tokens: all tokens from the root; blocks: the full blocks that hold them, from the first.
  Result<std::vector<PublishedBlock>> publish(std::span<const int32_t> tokens,
                                              std::span<const BlockHandle> blocks,
                                              const std::string& adapter = "",
                                              std::span<const std::string> extra = {});
  // extra: empty, or bytes (of an image, say) for each full block of `tokens`, part of its key.
  Result<Prefix> lookup(std::span<const int32_t> tokens, bool hold = true,
                        const std::string& adapter = "", std::span<const std::string> extra = {});
  Status copy(std::span<const BlockHandle> from, std::span<const BlockHandle> to);
  Result<std::vector<PoolGroupStats>> stats();

  // K and V rows into slots (block id * block_tokens + offset; negative: the row is skipped).
  // k: [num_rows, num_kv_heads, k_dim], v: [num_rows, num_kv_heads, v_dim]; any strides. MLA pools:
  // k is the latent [num_rows, 1, 512], v the rope part [num_rows, 1, 64].
  Status append(int32_t layer, const TensorView& k, const TensorView& v,
                std::span<const int64_t> slots);
  Status attend(int32_t layer, const AttendBatch& batch, const AttendOptions& options = {});
  Status sparse_attend(int32_t layer, const SparseBatch& batch, const AttendOptions& options);
  Status gather(int32_t layer, const GatherBatch& batch);
  // Row i of k_out and v_out is the token in slots[i], dequantised; negative: the row stays. A
  // tensor with shape[0] = 0 is not wanted; MLA pools fill k_out [rows, 1, 576] alone.
  Status read(int32_t layer, const TensorView& k_out, const TensorView& v_out,
              std::span<const int64_t> slots);

  // Whole pages of one layer, or whole opaque blocks (layer 0), as they lie in the pool: page_bytes
  // each, one after another. Writing needs blocks that are open in this session, reading open or
  // published ones.
  int64_t page_bytes() const;
  Status read_pages(int32_t layer, std::span<const int32_t> blocks, std::span<std::byte> bytes);
  Status write_pages(int32_t layer, std::span<const int32_t> blocks,
                     std::span<const std::byte> bytes);
  // The same, to and from an engine's own layout (larder/paged_kv.h), in packed space: bytes are
  // moved, never requantised. `paged` holds exactly as many tokens as the blocks. Keys of a pool
  // with a key transform leave as they are stored: transformed.
  Status export_pages(int32_t layer, std::span<const int32_t> blocks, const PagedKv& paged);
  Status import_pages(int32_t layer, std::span<const int32_t> blocks, const PagedKv& paged);
  // Zeroes open blocks of this session, all layers.
  Status scrub(std::span<const int32_t> blocks);
  // One figure per block over all its layers; equal bytes give equal figures.
  Result<std::vector<uint64_t>> checksum(std::span<const int32_t> blocks);

  Sequence begin_sequence();

  // The pool's memory in this process, for engines that run their own kernels; mapped on first use.
  // Block b, layer l lies at data() + b * block_stride_bytes() + l * layer_stride_bytes().
  Result<std::byte*> data();
  int64_t block_stride_bytes() const;
  int64_t layer_stride_bytes() const;

  struct Impl;

 private:
  friend class Client;
  explicit Pool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// A block table that grows: one sequence's tokens over a pool's blocks.
class Sequence {
 public:
  Sequence(Sequence&&) noexcept;
  Sequence& operator=(Sequence&&) noexcept;
  ~Sequence();  // end()

  // Tokens whose K and V have a place, those of the last extend included.
  int64_t num_tokens() const;
  std::span<const BlockHandle> blocks() const;
  std::span<const int32_t> block_ids() const;  // a block-table row

  // Starts an empty sequence from the longest published prefix of `tokens`, but never all of them:
  // at least one token stays to be computed. Returns the tokens that need no computing.
  Result<int64_t> adopt_prefix(std::span<const int32_t> tokens, const std::string& adapter = "");
  // Makes room for num_tokens more tokens. All or nothing.
  Status extend(int64_t num_tokens);
  // Slots of the tokens of the last extend, for Pool::append of a batch.
  std::span<const int64_t> last_slots() const;
  // K and V of the tokens of the last extend.
  Status append(int32_t layer, const TensorView& k, const TensorView& v);
  // Attention of the last q.shape[0] tokens over the whole sequence.
  Status attend(int32_t layer, const TensorView& q, const TensorView& out, float* lse = nullptr,
                const AttendOptions& options = {});
  // Publishes the full blocks. `tokens` are the ids of all tokens so far. Call it when every layer
  // of those blocks has been appended.
  Status publish(std::span<const int32_t> tokens, const std::string& adapter = "");
  // A second sequence over the same tokens. Blocks are shared; whoever writes into a partly filled
  // one first gets its own copy (in extend).
  Sequence fork() const;
  // Forgets the tokens from num_tokens on; INVALID_ARGUMENT if there are fewer.
  Status truncate(int64_t num_tokens);
  // Releases the blocks. The sequence is empty afterwards.
  Status end();

  struct Impl;

 private:
  friend class Pool;
  explicit Sequence(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace larder
