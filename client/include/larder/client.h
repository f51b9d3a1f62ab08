// The client library: connect to a daemon, open a pool, append K and V, attend over them.
//
//     auto client = larder::Client::connect({.socket_path = "/run/larder/larderd.sock"}).value();
//     larder::PoolOptions options;             // name, model, geometry, num_blocks, ...
//     auto pool = client.open_pool(options).value();
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
// A daemon that goes (killed, upgraded) and comes back: the client resumes its session by itself,
// also while the engine makes no calls, and holds what it held. Mapped memory stays as it is; calls
// wait for the daemon within their deadlines, and are done once. STALE_SESSION is the end: the
// daemon does not know the session any more (it was away for longer than the daemon's grace
// period, say), and all further calls say so. Make a new Client then. Client::connect itself does
// not wait for a daemon that is not there.
//
// Thread rule: a Client, and the pools and sequences made from it, are used by one thread at a
// time. Different clients are independent. A Client outlives its pools, a Pool its sequences. Every
// Client has a thread of its own, with all signals blocked, which sleeps unless the daemon has
// something to say or is gone. A forked child does not have it, and must not use or destroy the
// Client and what was made from it.
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

#include "larder/append.h"
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

// A group stores K and V of attention layers, rows of MLA layers (geometry = mla_geometry(...)), or
// blocks of bytes that only the engine understands (opaque_block_bytes).
struct GroupOptions {
  std::string group_name = {};  // unique in the pool; empty: "attention", "mla" or "opaque"
  AttentionGeometry geometry = {};
  Encoder encoder = Encoder::kReference;
  KeyTransform key_transform = KeyTransform::kNone;
  // [num_layers, num_kv_heads, k_dim] for the centred transforms, else empty (larderctl calibrate
  // writes them). Every session that opens the pool states the same.
  std::vector<float> key_offsets = {};
  int64_t opaque_block_bytes = 0;  // > 0: an opaque group; of geometry, block_tokens alone is used
  KvLayout layout = KvLayout::kBlhnc;
  int64_t num_blocks = 0;
  int64_t max_blocks = 0;     // 0: num_blocks; more: Pool::resize grows the group up to this
  int64_t segment_bytes = 0;  // of one segment of a group that grows; 0: the daemon chooses
  int32_t window_tokens =
      -1;  // tokens that a prefix needs of these layers' window; -1: all of them
  bool reserve_block_zero = false;    // keep block 0 as a null block
  std::vector<double> k_scales = {};  // empty: 1; one entry: all layers; else one per layer
  std::vector<double> v_scales = {};  // likewise
};

// A pool is the KV memory of one model: one group for most, with the options beside it.
struct PoolOptions : GroupOptions {
  std::string name = {};   // unique within the tenant; opening an existing pool attaches to it
  std::string model = {};  // model and revision; part of every prefix key
  Execution execution = Execution::kInProcess;
  // Whose memory: "host", or a GPU's UUID ("GPU-..."); empty: as the daemon is configured.
  std::string device = {};
  // In process on a GPU: the cudaStream_t that calls are ordered in. They then return when they
  // are enqueued, unless they write pageable host memory. nullptr: calls return when they are done.
  void* stream = nullptr;
  std::vector<GroupOptions> more_groups = {};  // layers of other geometries
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

// A prefix in a pool with several groups.
struct UnitPrefix {
  int64_t hit_tokens = 0;  // a multiple of Pool::unit_tokens
  // Of each group; id -1 where a windowed or an opaque group needs none.
  std::vector<std::vector<BlockHandle>> blocks;
};

struct ResizeResult {
  int64_t blocks_before = 0, blocks_after = 0;
  int64_t bytes_before = 0, bytes_after = 0;
};

struct PoolGroupStats {
  std::string name;
  int64_t capacity = 0, free = 0, open = 0, published = 0, cached = 0, quarantined = 0;  // blocks
  int64_t physical_bytes = 0, used_bytes = 0, slack_bytes = 0;
  int64_t max_blocks = 0;
  int64_t evictable = 0;      // blocks
  int64_t leaving_bytes = 0;  // in segments that sessions have not unmapped yet
  // Of the quarantined blocks, by what must be waited for: a process's end, an MPS client's end,
  // all sessions that mapped the memory, or the executor's queued work.
  int64_t quarantined_pidfd = 0, quarantined_mps = 0, quarantined_unprovable = 0;
  int64_t quarantined_executor_only = 0;
};

// Memory of the engine that its calls on request use where it lies, instead of copying it through
// the arena.
enum class ImportKind : uint8_t {
  kMemfd,    // fd: a memfd with F_SEAL_SHRINK, mapped at base
  kVmm,      // fd: an allocation of the CUDA driver, exported as a POSIX fd and mapped at base
  kCudaIpc,  // handle: a cudaIpcMemHandle_t; where the daemon's trust_ipc_handles is true. Memory
             // of cudaMallocAsync and of expandable segments has none
};
struct MemoryImport {
  ImportKind kind = ImportKind::kMemfd;
  void* base = nullptr;  // in this process: [base, base + size_bytes) may be named
  int64_t size_bytes = 0;
  int64_t offset_bytes = 0;  // of base in what fd or handle stands for
  int fd = -1;               // stays the caller's
  std::array<std::byte, 64> handle = {};
};

class Pool;
class Sequence;

class Client {
 public:
  static Result<Client> connect(ClientOptions options);
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  // Says goodbye: everything the session held is released. Waits at most a second for a daemon that
  // is away.
  ~Client();

  Result<Pool> open_pool(const PoolOptions& options);

  // For pools on request, opened before: dense tensors of append, attend and sparse_attend that lie
  // in the memory are used there, by the executor's GPU or CPU. All other tensors of calls on
  // request are host memory. The memory stays until drop_import, or the end of the session, whoever
  // else lets go of it; with kCudaIpc, whose owner could free it, as long as the owner keeps it.
  // Gone after a restart of the daemon (boot_id changes): calls then answer NOT_FOUND, and import
  // again. INVALID_ARGUMENT or PERMISSION_DENIED with the reason.
  Result<uint64_t> import_memory(const MemoryImport& memory);
  // After it returns no call uses the memory. NOT_FOUND for an import that is not there.
  Status drop_import(uint64_t import_id);
  // From then on calls on request run after all work that is in the stream when they are made (a
  // cudaStream_t of the GPU whose pool was opened first), by a word that the stream writes in the
  // arena. They return when they are done, so what is put into the stream afterwards comes after
  // them. UNSUPPORTED for sessions whose pools are host memory.
  Status order_after(void* stream);

  uint64_t session_id() const;
  // Changes when the daemon has restarted.
  uint64_t boot_id() const;
  // Names the cache; stays over restarts of the daemon that lose nothing.
  uint64_t cache_id() const;
  // How often the session was resumed, and the longest time from a loss to that.
  uint64_t resumes() const;
  std::chrono::microseconds longest_outage() const;

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
  // While the daemon is away, destructors of pools and sequences wait until one deadline after it
  // went, in all; what they could not say is said by the end of the session.
  ~Pool();

  const AttentionGeometry& geometry() const;
  Execution execution() const;
  const std::string& device() const;  // "host", or the GPU's UUID
  int64_t num_blocks() const;         // at the pool's creation
  int64_t max_blocks() const;         // block ids go up to this
  bool created() const;               // false: attached to a pool that was there

  // A pool with several groups: each group as a Pool of its own, on whose blocks and layers all
  // calls act that are not of the whole pool (evict, stats, publish_units, lookup_units). A Pool
  // is its first group. INVALID_ARGUMENT for an index past the last.
  int32_t num_groups() const;
  Result<Pool> group(int32_t index);

  // Grows or shrinks the group to num_blocks, in whole segments. Shrinking takes free and cached
  // blocks; memory comes back when every session has unmapped it, which clients do by themselves.
  Result<ResizeResult> resize(int64_t num_blocks);
  // Evicts cached blocks of the pool until num_blocks are free again or none is left; in a pool
  // with several groups whole units, so that more may go.
  Result<ResizeResult> evict(int64_t num_blocks);

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
  // The same for pools with several groups, in units of unit_tokens() tokens: the least common
  // multiple of the groups' block_tokens. blocks: for each group its blocks of all units, from the
  // first: unit_tokens / block_tokens a unit, of an opaque group one; BlockHandle() where a
  // windowed or an opaque group has none. extra: empty, or bytes for each unit. In a pool with one
  // group a unit is a block.
  int64_t unit_tokens() const;
  int64_t blocks_per_unit(int32_t group) const;  // 0 for an index past the last
  Result<std::vector<std::vector<PublishedBlock>>> publish_units(
      std::span<const int32_t> tokens, const std::vector<std::vector<BlockHandle>>& blocks,
      const std::string& adapter = "", std::span<const std::string> extra = {});
  Result<UnitPrefix> lookup_units(std::span<const int32_t> tokens, bool hold = true,
                                  const std::string& adapter = "",
                                  std::span<const std::string> extra = {});
  Status copy(std::span<const BlockHandle> from, std::span<const BlockHandle> to);
  Result<std::vector<PoolGroupStats>> stats();  // of all groups

  // K and V rows into slots (block id * block_tokens + offset; negative: the row is skipped).
  // k: [num_rows, num_kv_heads, k_dim], v: [num_rows, num_kv_heads, v_dim]; any strides. MLA pools:
  // k is the latent [num_rows, 1, 512], v the rope part [num_rows, 1, 64].
  Status append(int32_t layer, const TensorView& k, const TensorView& v,
                std::span<const int64_t> slots, const AppendOptions& options = {});
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
  // Whole blocks, all layers: block_bytes each, dense, layer after layer. In process on a GPU one
  // batch of copies, and pinned or registered memory needs no staging; on request layer by layer: a
  // write_blocks that fails on the way has written some of the layers.
  int64_t block_bytes() const;
  Status read_blocks(std::span<const int32_t> blocks, std::span<std::byte> bytes);
  Status write_blocks(std::span<const int32_t> blocks, std::span<const std::byte> bytes);
  // Pages, to and from an engine's own layout (larder/paged_kv.h), in packed space: bytes are
  // moved, never requantised. `paged` holds exactly as many tokens as the blocks. Keys of a pool
  // with a key transform leave as they are stored: transformed.
  Status export_pages(int32_t layer, std::span<const int32_t> blocks, const PagedKv& paged);
  Status import_pages(int32_t layer, std::span<const int32_t> blocks, const PagedKv& paged);
  // Zeroes open blocks of this session, all layers.
  Status scrub(std::span<const int32_t> blocks);
  // One figure per block over all its layers; equal bytes give equal figures.
  Result<std::vector<uint64_t>> checksum(std::span<const int32_t> blocks);

  Sequence begin_sequence();  // UNSUPPORTED, from its first use, in a pool with several groups

  // In process on a GPU: calls in a stream of the engine (a cudaStream_t; nullptr: the default one)
  // whose tables are in device memory, as are all tensors: enqueued and not waited for, and
  // capturable in a CUDA graph, which reads lengths, tables and values when it is replayed. Make a
  // call of the same shapes once before it is captured, so that the workspace is there
  // (RESOURCE_EXHAUSTED otherwise). Nobody checks the tables: slots and blocks must be of blocks
  // that the session holds, and what is out of range is left out. UNSUPPORTED for host memory and
  // on request.
  Status append_in_stream(int32_t layer, const TensorView& k, const TensorView& v,
                          const int64_t* slots, int64_t num_slots, void* stream);
  Status append_in_stream(int32_t layer, const TensorView& k, const TensorView& v,
                          const DeviceAppendBatch& batch, void* stream);
  // Rows of several layers, each once, to the same slots: one launch where the GPU's kernels allow
  // it. All k have one dtype, shape and strides, and so have all v.
  Status append_layers_in_stream(std::span<const LayerRows> layers, const DeviceAppendBatch& batch,
                                 void* stream);
  Status attend_in_stream(int32_t layer, const DeviceAttendBatch& batch,
                          const AttendOptions& options, void* stream);
  Status gather_in_stream(int32_t layer, const TensorView& k_out, const TensorView& v_out,
                          const int64_t* slots, int64_t num_slots, void* stream);
  Status gather_in_stream(int32_t layer, const DeviceGatherBatch& batch, void* stream);

  // The group's memory in this process, for engines that run their own kernels; mapped on first
  // use. Block b, layer l lies at data() + b * block_stride_bytes() + l * layer_stride_bytes().
  // Where a pool grows, blocks that a call has named are mapped; an access to others may fault. In
  // a GPU pool it is a device address.
  Result<std::byte*> data();
  int64_t block_stride_bytes() const;
  int64_t layer_stride_bytes() const;

  struct Impl;

 private:
  friend class Client;
  explicit Pool(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // owners: the Pools of one open_pool
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
