// Every limit of the protocol, by name. A value past a limit is answered with INVALID_ARGUMENT (or
// RESOURCE_EXHAUSTED where another moment could serve it) and the limit's figure.
#pragma once

#include <cstddef>
#include <cstdint>

namespace larder::protocol {

// Versions of the schema this build speaks. A session runs at the highest that both sides have.
inline constexpr uint32_t kMinVersion = 1;
inline constexpr uint32_t kMaxVersion = 1;

inline constexpr size_t kMaxMessageBytes = size_t{128} * 1024;
inline constexpr size_t kMaxFdsPerMessage = 64;
inline constexpr size_t kMaxNestingLevels = 16;

inline constexpr size_t kMaxNameBytes = 128;
inline constexpr size_t kMaxErrorBytes = 1024;
inline constexpr size_t kMaxGroups = 16;
inline constexpr size_t kMaxLayers = 4096;
inline constexpr size_t kMaxBlocksPerMessage = 8192;
inline constexpr size_t kMaxBlocksPerPublish = 2048;
inline constexpr size_t kMaxBlocksPerCopy = 4096;
inline constexpr size_t kMaxSegmentsPerGroup = 4096;
inline constexpr size_t kMaxSegmentsPerPool = 8192;  // one reply names them all
inline constexpr size_t kMaxIdentityFields = 256;
inline constexpr size_t kMaxIdentityValueBytes = 256;
inline constexpr size_t kMaxCapabilities = 512;
inline constexpr size_t kMaxCapabilityTextBytes = 32;
inline constexpr size_t kMaxTokensInline = size_t{24} * 1024;
inline constexpr size_t kMaxTokensInArena = size_t{4} << 20;
inline constexpr size_t kMaxFloatsInline = size_t{16} * 1024;
inline constexpr size_t kMaxFloatsInArena = size_t{4} << 20;
inline constexpr size_t kMaxExtraBytesPerBlock = 1024;

inline constexpr size_t kMaxSessions = 1024;
inline constexpr size_t kMaxSessionsPerPage = 192;
inline constexpr size_t kMaxFenceBytes = 32;
inline constexpr size_t kMaxTenants = 512;  // one reply names them all
inline constexpr size_t kMaxPools = 1024;
inline constexpr size_t kMaxDevices = 65;  // host memory and 64 GPUs
inline constexpr size_t kMaxImportsPerSession = 64;
inline constexpr uint64_t kMaxImportBytes = uint64_t{1} << 42;
inline constexpr size_t kIpcHandleBytes = 64;
// Pools differ in size: a page takes pools while the sum of their page_bytes() stays within this.
inline constexpr size_t kMaxPoolPageBytes = kMaxMessageBytes - 1024;
inline constexpr size_t kMaxPendingRequestsPerSession = 64;
inline constexpr size_t kMaxQueuedRepliesPerSession = 256;

// Room in a socket buffer for one largest message with its bookkeeping.
inline constexpr int kSocketBufferBytes = 4 * static_cast<int>(kMaxMessageBytes);

inline constexpr uint64_t kMaxDeadlineUs = uint64_t{3600} * 1'000'000;

// The arena of one session (protocol/arena.h).
inline constexpr uint64_t kMinArenaBytes = uint64_t{1} << 20;
inline constexpr uint64_t kMaxArenaBytes = uint64_t{1} << 30;
inline constexpr uint32_t kSubmissionSlots = 64;
inline constexpr uint32_t kCompletionSlots = 128;
inline constexpr uint32_t kTimelineWords = 64;

// Keys of a token list are hashed on the daemon's only thread: about 0.6 us each.
inline constexpr size_t kMaxBlocksPerTokenList = 131072;
// Unread replies of a session beyond which no further file descriptors are sent to it.
inline constexpr int kMaxUnreadBytesForFds = 16 * 1024;

// One submission. What an attention costs in products (submission_attend.cpp counts them) bounds
// how long others wait for it: some ten seconds of one core.
inline constexpr int64_t kMaxAttendProductsPerCall = int64_t{1} << 36;
// Bytes that one call about blocks may go through: a few seconds, too.
inline constexpr int64_t kMaxBlockBytesPerCall = int64_t{1} << 35;
inline constexpr int64_t kMaxRowsPerCall = int64_t{1} << 20;
inline constexpr int64_t kMaxSequencesPerCall = int64_t{1} << 16;
inline constexpr int64_t kMaxTableEntriesPerCall = int64_t{1} << 24;

}  // namespace larder::protocol
