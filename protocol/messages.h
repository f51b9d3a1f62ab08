// The messages as plain structs, and their codec.
//
// decode_* accepts bytes from anybody: what it returns is within every limit of limits.h, and every
// string is short enough to print. What only the state can know (does the pool exist, is the format
// served) is not judged here. Field meanings and units are in larder.capnp. Thread rule: all
// functions may be called from any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "larder/status.h"

namespace larder::protocol {

using Bytes = std::vector<std::byte>;  // one serialized message

struct Block {
  int32_t id = -1;
  uint32_t generation = 0;
  bool operator==(const Block&) const = default;
};
struct ArenaRange {
  uint64_t offset_bytes = 0;
  uint64_t count = 0;  // elements of 4 bytes
};
using TokenList = std::variant<std::vector<int32_t>, ArenaRange>;
using FloatList = std::variant<std::vector<float>, ArenaRange>;

// ----------------------------------------------------------------------------------------- pools

struct AttentionGroup {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t k_dim = 0;
  int32_t v_dim = 0;
  std::string k_format;
  std::string v_format;
  std::string encoder = "reference";
  std::string key_transform = "none";
  std::vector<double> k_scales;
  std::vector<double> v_scales;
  int32_t window_tokens = -1;
  FloatList key_offsets;
};
struct MlaGroup {
  int32_t num_layers = 0;
  std::string row_format;
  std::vector<double> k_scales;
};
struct OpaqueGroup {
  int64_t block_bytes = 0;
};
struct GroupSpec {
  std::string name;
  int32_t block_tokens = 0;
  int64_t num_blocks = 0;
  int64_t max_blocks = 0;
  std::string layout = "BLHNC";
  bool reserve_block_zero = false;
  std::vector<int32_t> layer_aliases;
  std::variant<AttentionGroup, MlaGroup, OpaqueGroup> kind;
  int64_t segment_bytes = 0;
};
struct PoolSpec {
  std::string name;
  std::string model;
  std::vector<GroupSpec> groups;
  std::string device = {};
};
struct GroupLayout {
  int64_t block_bytes = 0;
  int64_t block_stride_bytes = 0;
  int64_t layer_stride_bytes = 0;
  int64_t num_blocks = 0;
  std::vector<int64_t> segment_bytes;
  int64_t max_blocks = 0;
  int64_t extent_bytes = 0;

  // How many block ids there are, whether their memory is there or not.
  int64_t num_ids() const { return max_blocks > num_blocks ? max_blocks : num_blocks; }
};

// -------------------------------------------------------------------------------------- requests

struct Connect {
  uint32_t min_version = 0;
  uint32_t max_version = 0;
  std::string tenant;
  std::string token;
  std::string role;
  std::string client_name;
  uint64_t arena_bytes = 0;
  bool notices = false;
};
using SessionToken = std::array<uint8_t, 32>;
struct Resume {
  SessionToken session_token = {};
  uint32_t min_version = 0;
  uint32_t max_version = 0;
  uint64_t cache_id = 0;
  bool notices = false;
};
struct Goodbye {};
struct OpenPool {
  PoolSpec spec;
};
struct ClosePool {
  uint64_t pool = 0;
};
struct DestroyPool {
  uint64_t pool = 0;
};
struct OpenSegments {
  uint64_t pool = 0;
  uint32_t group = 0;
  uint32_t first = 0;
  uint32_t count = 0;
};
struct Allocate {
  uint64_t pool = 0;
  uint32_t group = 0;
  int64_t num_blocks = 0;
  int64_t total_blocks = 0;
};
struct Release {
  uint64_t pool = 0;
  uint32_t group = 0;
  std::vector<Block> blocks;
};
// The blocks of Publish, Published and Prefix are those of the first group for all units, then
// those of the second, and so on; id -1 where a windowed or opaque group has none. One group: a
// unit is a block. See larder.capnp.
struct Publish {
  uint64_t pool = 0;
  std::string adapter;
  TokenList tokens;
  std::vector<Block> blocks;
  std::vector<std::string> extra;
  int64_t first_block = 0;
};
struct Lookup {
  uint64_t pool = 0;
  std::string adapter;
  TokenList tokens;
  std::vector<std::string> extra;
  bool hold = false;
  int64_t first_block = 0;
};
struct Copy {
  uint64_t pool = 0;
  uint32_t group = 0;
  std::vector<Block> from;
  std::vector<Block> to;
};
struct ListPools {
  uint64_t after = 0;
};
struct ListSessions {
  uint64_t after = 0;
};
struct GetStatus {};
struct GetCapabilities {};
struct ResizePool {
  uint64_t pool = 0;
  uint32_t group = 0;
  int64_t num_blocks = 0;
};
struct Evict {
  uint64_t pool = 0;
  int64_t num_blocks = 0;
};
struct SetQuota {
  std::string tenant;
  int64_t guaranteed_bytes = 0;
  int64_t maximum_bytes = 0;  // 0: no maximum
};
struct ListTenants {};
struct RegisterImport {
  uint64_t size_bytes = 0;
  std::string kind;    // "memfd", "vmm", "cuda_ipc"
  std::string handle;  // cuda_ipc: 64 bytes
  uint64_t offset_bytes = 0;
};
struct DropImport {
  uint64_t import_id = 0;
};

using RequestBody = std::variant<Connect, Goodbye, OpenPool, ClosePool, DestroyPool, OpenSegments,
                                 Allocate, Release, Publish, Lookup, Copy, ListPools, ListSessions,
                                 GetStatus, GetCapabilities, Resume, ResizePool, Evict, SetQuota,
                                 ListTenants, RegisterImport, DropImport>;
struct Request {
  uint64_t id = 0;
  uint64_t deadline_us = 0;
  RequestBody body;
  uint64_t answered_below = 0;  // at most id
};

// --------------------------------------------------------------------------------------- replies

struct Done {};
struct Connected {
  uint32_t version = 0;
  uint64_t session = 0;
  SessionToken session_token = {};
  uint64_t arena_bytes = 0;
  uint64_t cache_id = 0;
};
struct PoolOpened {
  uint64_t pool = 0;
  bool created = false;
  std::vector<GroupLayout> groups;
  std::string device = {};
  bool on_request = false;
};
struct Imported {
  uint64_t import_id = 0;
};
struct Segments {
  std::vector<int64_t> size_bytes;  // one fd for each that is not 0
};
struct Blocks {
  std::vector<Block> blocks;
};
struct PublishedBlock {
  std::array<uint8_t, 32> key = {};
  Block block;
};
struct Published {
  std::vector<PublishedBlock> blocks;
};
struct Prefix {
  int64_t hit_tokens = 0;
  std::vector<Block> blocks;
};
struct GroupInfo {
  std::string name;
  int64_t capacity = 0;
  int64_t free = 0;
  int64_t open = 0;
  int64_t published = 0;
  int64_t cached = 0;
  int64_t quarantined = 0;
  int64_t physical_bytes = 0;
  int64_t used_bytes = 0;
  int64_t slack_bytes = 0;
  int64_t max_blocks = 0;
  int64_t evictable = 0;
  int64_t leaving_bytes = 0;
  int64_t quarantined_pidfd = 0;
  int64_t quarantined_mps = 0;
  int64_t quarantined_unprovable = 0;
  int64_t quarantined_executor_only = 0;
};
struct PoolInfo {
  uint64_t pool = 0;
  std::string tenant;
  std::string name;
  std::string model;
  std::vector<std::pair<std::string, std::string>> identity;
  int64_t num_sessions = 0;
  std::vector<GroupInfo> groups;
  uint64_t allocated_blocks_total = 0;
  uint64_t evicted_blocks_total = 0;
  uint64_t published_blocks_total = 0;
  uint64_t lookup_tokens_total = 0;
  uint64_t lookup_hit_tokens_total = 0;
  uint64_t appended_tokens_total = 0;
  uint64_t attended_rows_total = 0;
  std::string device = {};
};
struct Pools {
  std::vector<PoolInfo> pools;
  bool more = false;
};
struct SessionInfo {
  uint64_t session = 0;
  std::string tenant;
  std::string role;
  std::string client_name;
  int64_t pid = 0;
  int64_t uid = 0;
  int64_t num_pools = 0;
  int64_t open_blocks = 0;
  int64_t holds = 0;
  bool mapped = false;
  uint64_t connected_us = 0;
  bool closing = false;
  std::string fence = {};
  bool absent = false;
  int64_t pending_unmap_bytes = 0;
};
struct Sessions {
  std::vector<SessionInfo> sessions;
  bool more = false;
};
struct ExecutorInfo {
  std::string device;
  int64_t pid = 0;
  uint64_t restarts = 0;
  bool ready = false;
};
struct DaemonStatus {
  std::string version;
  int64_t pid = 0;
  uint64_t uptime_us = 0;
  int64_t memory_bytes = 0;
  int64_t physical_bytes = 0;
  int64_t num_pools = 0;
  int64_t num_sessions = 0;
  int64_t executor_pid = 0;
  uint64_t executor_restarts = 0;
  int64_t keeper_pid = 0;
  int64_t keeper_segments = 0;
  std::string backend;
  bool ready = false;
  uint64_t boot_id = 0;
  uint64_t cache_id = 0;
  uint64_t journal_bytes = 0;
  uint64_t journal_records = 0;
  uint64_t checkpoints = 0;
  int64_t recovered_sessions = 0;
  int64_t recovered_pools = 0;
  std::string not_ready = {};
  std::vector<ExecutorInfo> executors = {};
};
struct Capability {
  std::string op;
  std::string backend;
  std::string k_format;
  std::string v_format;
  int32_t dim_multiple = 0;
  int32_t dim_max = 0;
};
struct Capabilities {
  std::vector<Capability> rows;
};
struct Resized {
  int64_t blocks_before = 0;
  int64_t blocks_after = 0;
  int64_t bytes_before = 0;
  int64_t bytes_after = 0;
};
struct TenantInfo {
  std::string name;
  int64_t guaranteed_bytes = 0;
  int64_t maximum_bytes = 0;
  int64_t used_bytes = 0;
  int64_t evictable_bytes = 0;
  int64_t leaving_bytes = 0;
};
struct Tenants {
  std::vector<TenantInfo> tenants;
};

// A Status in a Reply is a refusal.
using ReplyBody =
    std::variant<Status, Done, Connected, PoolOpened, Segments, Blocks, Published, Prefix, Pools,
                 Sessions, DaemonStatus, Capabilities, Resized, Tenants, Imported>;
struct Reply {
  uint64_t id = 0;
  uint64_t boot_id = 0;
  ReplyBody body;
};

// May be longer than kMaxMessageBytes, because every list of a request can be within its own limit
// and the sum too long: look before send(); send_before() refuses it. Replies that keep to the
// limits of limits.h always fit; see kMaxSessionsPerPage and kMaxPoolPageBytes for those in pages.
Bytes encode(const Request& request);
Bytes encode(const Reply& reply);
// What this pool adds to the size of a Pools reply.
size_t page_bytes(const PoolInfo& pool);
// The id of a request that is refused here is still found where it can be (0 otherwise).
struct DecodedRequest {
  uint64_t id = 0;
  Result<Request> request;
};
DecodedRequest decode_request(std::span<const std::byte> bytes);
Result<Reply> decode_reply(std::span<const std::byte> bytes);

}  // namespace larder::protocol
