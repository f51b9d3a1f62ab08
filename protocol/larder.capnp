@0xb7c3a1f29d5e8046;
# The wire schema: messages between clients and larderd. executor.capnp has those of the executor.
#
# One message and its file descriptors travel together on a SOCK_SEQPACKET Unix socket. The plain
# structs that the rest of the code uses are in messages.h, with every limit that is checked.
# Fields are only ever added, at the end. A message that sets a field which the receiver does not
# know is refused: a sender uses only what the negotiated version has.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("larder::wire");

struct Block {
  id @0 :Int32;
  generation @1 :UInt32;
}

struct ArenaRange {           # a range of the session's arena, copied before it is used
  offsetBytes @0 :UInt64;
  count @1 :UInt64;           # elements, not bytes
}

# Token ids.
struct TokenList { union { inline @0 :List(Int32); arena @1 :ArenaRange; } }
struct FloatList { union { inline @0 :List(Float32); arena @1 :ArenaRange; } }

struct Pair { name @0 :Text; value @1 :Text; }

# ------------------------------------------------------------------------------------- pools

struct AttentionGroup {
  numLayers @0 :Int32;
  numKvHeads @1 :Int32;
  kDim @2 :Int32;
  vDim @3 :Int32;
  kFormat @4 :Text;           # "nvfp4", "bf16", ...
  vFormat @5 :Text;
  encoder @6 :Text;           # "reference", "four_over_six", "best_scale"
  keyTransform @7 :Text;      # "none", "centred", "rotated", "centred_rotated"
  kScales @8 :List(Float64);  # empty: 1; one: all layers; else one per layer
  vScales @9 :List(Float64);
  windowTokens @10 :Int32;    # -1: full attention
  keyOffsets @11 :FloatList;  # [num_layers, num_kv_heads, k_dim] if centred, else empty
}

struct MlaGroup {
  numLayers @0 :Int32;
  rowFormat @1 :Text;         # "nvfp4_ds_mla", "fp8_ds_mla", "fp8_mla", "bf16_mla"
  kScales @2 :List(Float64);  # as in AttentionGroup
}

struct OpaqueGroup {
  blockBytes @0 :Int64;
}

struct GroupSpec {
  name @0 :Text;
  blockTokens @1 :Int32;
  numBlocks @2 :Int64;
  maxBlocks @3 :Int64;        # 0 or numBlocks: the pool has a fixed size; more: it grows up to this
  layout @4 :Text;            # "BLHNC" or "LBHNC"
  reserveBlockZero @5 :Bool;
  layerAliases @6 :List(Int32);  # empty, or for each layer the layer whose memory it uses
  union {
    attention @7 :AttentionGroup;
    mla @8 :MlaGroup;
    opaque @9 :OpaqueGroup;
  }
  segmentBytes @10 :Int64;    # of every extent; 0: larderd chooses
}

struct PoolSpec {
  name @0 :Text;
  model @1 :Text;
  groups @2 :List(GroupSpec);
  device @3 :Text;            # "host", or a GPU's UUID ("GPU-...", "MIG-..."); empty: larderd's own
}

struct GroupLayout {
  blockBytes @0 :Int64;
  blockStrideBytes @1 :Int64;
  layerStrideBytes @2 :Int64;
  numBlocks @3 :Int64;            # of a pool of fixed size; of one that grows: at its creation
  segmentBytes @4 :List(Int64);   # in mapping order; of a pool that grows: all up to maxBlocks
  maxBlocks @5 :Int64;            # ids go up to this; 0: numBlocks, a fixed size
  extentBytes @6 :Int64;          # of every segment but a last, shorter one
}

# ---------------------------------------------------------------------------------- requests

# The ids of a session's requests increase and are never used again, over a resume neither. A
# request that is sent again after a resume bears its old id: it is done once, and answered as it
# was. Resume itself bears id 0.
struct Request {
  id @0 :UInt64;              # chosen by the client, comes back in the Reply
  deadlineUs @1 :UInt64;      # from receipt; 0: none
  union {
    connect @2 :Connect;
    goodbye @3 :Void;         # the client has unmapped everything: what it held is free at once
    openPool @4 :PoolSpec;
    closePool @5 :UInt64;
    destroyPool @6 :UInt64;
    openSegments @7 :OpenSegments;
    allocate @8 :Allocate;
    release @9 :BlockList;
    publish @10 :Publish;
    lookup @11 :Lookup;
    copy @12 :Copy;
    listPools @13 :UInt64;        # after this pool id; 0: from the first
    listSessions @14 :UInt64;     # after this session id; 0: from the first
    status @15 :Void;
    capabilities @16 :Void;
    resume @17 :Resume;           # instead of connect, as the first request of a connection
    resizePool @18 :ResizePool;
    evict @19 :Evict;
    setQuota @20 :SetQuota;
    registerImport @21 :RegisterImport;
    listTenants @23 :Void;
    dropImport @24 :UInt64;       # its calls have been answered
  }
  answeredBelow @22 :UInt64;  # the client has the replies to all ids below: larderd forgets them
}

struct Connect {
  minVersion @0 :UInt32;      # of this schema
  maxVersion @1 :UInt32;
  tenant @2 :Text;
  token @3 :Text;
  role @4 :Text;              # "read", "append", "admin"
  clientName @5 :Text;
  arenaBytes @6 :UInt64;      # 0: no arena, no on-request calls
  notices @7 :Bool;           # the client reads a notice socket (struct Notice)
}

# Answered with size 0 and no fd for an extent of a growing pool that is not there.
struct OpenSegments { pool @0 :UInt64; group @1 :UInt32; first @2 :UInt32; count @3 :UInt32; }
struct Allocate {
  pool @0 :UInt64;
  group @1 :UInt32;
  numBlocks @2 :Int64;
  totalBlocks @3 :Int64;      # this part of a long request and those to come; 0: numBlocks
}
struct BlockList { pool @0 :UInt64; group @1 :UInt32; blocks @2 :List(Block); }
# Publish and Lookup in a pool with several groups count in units: one unit is as many tokens as the
# least common multiple of all groups' blockTokens. The lists of blocks, of the requests and of the
# replies, are those of the first group for all n units, then those of the second, and so on; a
# group has unit / blockTokens blocks a unit, an opaque group one. Id -1 stands where a windowed or
# an opaque group has no block. In a pool with one group a unit is a block.
struct Publish {
  pool @0 :UInt64;
  adapter @1 :Text;
  tokens @2 :TokenList;
  blocks @3 :List(Block);
  extra @4 :List(Data);       # empty, or one entry per unit of the token list
  firstBlock @5 :Int64;       # the unit that blocks begin with; those before are published
}
struct Lookup {
  pool @0 :UInt64;
  adapter @1 :Text;
  tokens @2 :TokenList;
  extra @3 :List(Data);
  hold @4 :Bool;
  firstBlock @5 :Int64;       # look from this unit of the token list on
}
struct Copy { pool @0 :UInt64; group @1 :UInt32; from @2 :List(Block); to @3 :List(Block); }
# The session goes on over another connection: it holds what it held. Answered with connected, the
# same session and token, and no fds but the notice socket: the arena and its eventfd are those that
# the client has. Refused with STALE_SESSION (the sentence says why), PERMISSION_DENIED,
# SHUTTING_DOWN, or UNSUPPORTED versions.
struct Resume {
  sessionToken @0 :Data;
  minVersion @1 :UInt32;
  maxVersion @2 :UInt32;
  cacheId @3 :UInt64;         # as in Connected: another cache has none of the session's blocks
  notices @4 :Bool;           # as in Connect
}
struct ResizePool { pool @0 :UInt64; group @1 :UInt32; numBlocks @2 :Int64; }
struct Evict { pool @0 :UInt64; numBlocks @1 :Int64; }          # until so many blocks are free again
struct SetQuota {
  tenant @0 :Text;
  guaranteedBytes @1 :Int64;
  maximumBytes @2 :Int64;     # 0: no maximum
}
# Memory of the engine that its calls on request may name in tensors and tables. Kinds: "memfd" (a
# sealed one, as fd), "vmm" (an exported CUDA allocation, as fd), "cuda_ipc" (a handle of 64 bytes,
# of a session that the configuration trusts: its owner could free the memory under us). The part
# that may be named begins at offsetBytes of the memory or of the handle's allocation.
struct RegisterImport {
  sizeBytes @0 :UInt64;
  kind @1 :Text;
  handle @2 :Data;
  offsetBytes @3 :UInt64;
}

# ----------------------------------------------------------------------------------- replies

struct Reply {
  id @0 :UInt64;
  bootId @1 :UInt64;
  union {
    error @2 :Error;
    done @3 :Void;
    connected @4 :Connected;      # fds: arena memfd and eventfd where there is one, notice socket
    poolOpened @5 :PoolOpened;
    segments @6 :List(Int64);     # sizes in bytes; fds: one per size that is not 0
    blocks @7 :List(Block);
    published @8 :Published;
    prefix @9 :Prefix;
    pools @10 :Pools;
    sessions @11 :Sessions;
    status @12 :DaemonStatus;
    capabilities @13 :List(Capability);
    resized @14 :Resized;         # to resizePool and evict
    tenants @15 :List(TenantInfo);
    imported @16 :UInt64;         # names the import in records
  }
}

struct Error { code @0 :UInt16; message @1 :Text; }
struct Connected {
  version @0 :UInt32;
  session @1 :UInt64;
  sessionToken @2 :Data;      # proves the session to a restarted daemon
  arenaBytes @3 :UInt64;
  cacheId @4 :UInt64;         # changes only when larderd and its keeper were lost together
}
struct PoolOpened {
  pool @0 :UInt64;
  created @1 :Bool;
  groups @2 :List(GroupLayout);
  device @3 :Text;            # "host", or the GPU's UUID
  onRequest @4 :Bool;         # the session's ring is served where the pool is
}
struct Published { keys @0 :Data; blocks @1 :List(Block); }   # 32 bytes of key per block
struct Pools { pools @0 :List(PoolInfo); more @1 :Bool; }
struct Sessions { sessions @0 :List(SessionInfo); more @1 :Bool; }
struct Prefix { hitTokens @0 :Int64; blocks @1 :List(Block); }
# To evict: the cached blocks, and the same bytes before and after.
struct Resized {
  blocksBefore @0 :Int64;
  blocksAfter @1 :Int64;
  bytesBefore @2 :Int64;
  bytesAfter @3 :Int64;
}
struct TenantInfo {
  name @0 :Text;
  guaranteedBytes @1 :Int64;
  maximumBytes @2 :Int64;     # 0: no maximum
  usedBytes @3 :Int64;
  evictableBytes @4 :Int64;
  leavingBytes @5 :Int64;     # in segments that sessions have not unmapped yet
}

struct GroupInfo {
  name @0 :Text;
  capacity @1 :Int64;
  free @2 :Int64;
  open @3 :Int64;
  published @4 :Int64;
  cached @5 :Int64;
  quarantined @6 :Int64;
  physicalBytes @7 :Int64;
  usedBytes @8 :Int64;
  slackBytes @9 :Int64;
  maxBlocks @10 :Int64;
  evictable @11 :Int64;       # blocks
  leavingBytes @12 :Int64;    # in segments that sessions have not unmapped yet
  # Of the quarantined blocks, by what must be waited for.
  quarantinedPidfd @13 :Int64;
  quarantinedMps @14 :Int64;
  quarantinedUnprovable @15 :Int64;
  quarantinedExecutorOnly @16 :Int64;
}
struct PoolInfo {
  pool @0 :UInt64;
  tenant @1 :Text;
  name @2 :Text;
  model @3 :Text;
  identity @4 :List(Pair);
  numSessions @5 :Int64;
  groups @6 :List(GroupInfo);
  allocatedBlocksTotal @7 :UInt64;
  evictedBlocksTotal @8 :UInt64;
  publishedBlocksTotal @9 :UInt64;
  lookupTokensTotal @10 :UInt64;
  lookupHitTokensTotal @11 :UInt64;
  appendedTokensTotal @12 :UInt64;   # on request, summed over layers
  attendedRowsTotal @13 :UInt64;     # on request, summed over layers
  device @14 :Text;
}
struct SessionInfo {
  session @0 :UInt64;
  tenant @1 :Text;
  role @2 :Text;
  clientName @3 :Text;
  pid @4 :Int64;
  uid @5 :Int64;
  numPools @6 :Int64;
  openBlocks @7 :Int64;
  holds @8 :Int64;
  mapped @9 :Bool;            # has asked for segments
  connectedUs @10 :UInt64;    # since the connection
  closing @11 :Bool;          # the connection is gone, its process may still write
  fence @12 :Text;            # "pidfd", "mps", "unprovable", "executor_only"
  absent @13 :Bool;           # larderd has restarted, and the client has not come back yet
  pendingUnmapBytes @14 :Int64;  # of unmap notices that have not been acknowledged
}
struct DaemonStatus {
  version @0 :Text;
  pid @1 :Int64;
  uptimeUs @2 :UInt64;
  memoryBytes @3 :Int64;      # the limit over all pools
  physicalBytes @4 :Int64;
  numPools @5 :Int64;
  numSessions @6 :Int64;
  executorPid @7 :Int64;      # of a GPU in use, else of host memory; 0 while none runs
  executorRestarts @8 :UInt64;
  keeperPid @9 :Int64;
  keeperSegments @10 :Int64;
  backend @11 :Text;          # the device of pools that name none
  ready @12 :Bool;
  bootId @13 :UInt64;
  cacheId @14 :UInt64;
  journalBytes @15 :UInt64;
  journalRecords @16 :UInt64;
  checkpoints @17 :UInt64;
  recoveredSessions @18 :Int64;  # at this start
  recoveredPools @19 :Int64;
  notReady @20 :Text;         # why; empty when ready
  executors @21 :List(ExecutorInfo);
}
struct ExecutorInfo {
  device @0 :Text;            # "host", or a GPU's UUID
  pid @1 :Int64;              # 0 while none runs
  restarts @2 :UInt64;
  ready @3 :Bool;
}
struct Capability {
  op @0 :Text;
  backend @1 :Text;
  kFormat @2 :Text;
  vFormat @3 :Text;
  dimMultiple @4 :Int32;
  dimMax @5 :Int32;
}

# ---------------------------------------------------------------- the notice socket
#
# On the notice socket: larderd sends Notice, the client answers an unmap with NoticeAck.

struct Notice {
  union {
    unmap @0 :Unmap;          # the client unmaps this segment, then acknowledges
    shuttingDown @1 :Void;    # larderd ends by itself
  }
}
struct Unmap { pool @0 :UInt64; group @1 :UInt32; index @2 :UInt32; }
struct NoticeAck { pool @0 :UInt64; group @1 :UInt32; index @2 :UInt32; }
