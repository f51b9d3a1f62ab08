#include "daemon/journal_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>

#include "allocator/extent.h"
#include "allocator/host_memory.h"
#include "larder/system_error.h"

namespace larder::daemon {
namespace {

constexpr int64_t kMinCapacityBytes = int64_t{32} << 20;
constexpr int64_t kRoomBytes = int64_t{16} << 20;

// What the keeper stores beside the fd; for a reader of its entries, as the journal says it too.
struct JournalMetadata {
  char magic[8] = {'j', 'o', 'u', 'r', 'n', 'a', 'l', '1'};
  int64_t size_bytes = 0;
  uint8_t reserved[48] = {};
};
static_assert(sizeof(JournalMetadata) == 64);

std::span<std::byte> span_of(const SharedMapping& mapping) {
  return {mapping.data(), static_cast<size_t>(mapping.size_bytes())};
}

// The size of a memfd that can be mapped and written and will not shrink.
Result<int64_t> check_journal_fd(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0)
    return Status(ErrorCode::kInvalidArgument,
                  "the journal's fd " + std::to_string(fd) + ": " + SystemError("fstat").what());
  const int64_t size_bytes = status.st_size;
  if (Status checked = check_host_segment(fd, size_bytes); !checked.ok())
    return Status(checked.code(), "the journal's " + checked.message());
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0)
    return Status(ErrorCode::kInvalidArgument, "the journal's fd " + std::to_string(fd) +
                                                   " has seals " + std::to_string(seals) +
                                                   ", which forbid to write");
  if ((::fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR)
    return Status(ErrorCode::kInvalidArgument, "the journal's fd " + std::to_string(fd) +
                                                   " is not open for reading and writing");
  return size_bytes;
}

}  // namespace

int64_t JournalFile::capacity_for(size_t snapshot_bytes) {
  const int64_t wanted =
      std::max(kMinCapacityBytes, 2 * static_cast<int64_t>(snapshot_bytes) + kRoomBytes);
  return (wanted + kSegmentGranularityBytes - 1) / kSegmentGranularityBytes *
         kSegmentGranularityBytes;
}

JournalFile::JournalFile(Segment memory, SharedMapping mapping, Journal journal)
    : memory_(std::move(memory)), mapping_(std::move(mapping)), journal_(journal) {}

JournalFile JournalFile::make(uint64_t sequence, std::span<const std::byte> snapshot) {
  Segment memory = create_host_segment("larder-journal", capacity_for(snapshot.size()));
  SharedMapping mapping = SharedMapping::map(memory.fd.get(), memory.size_bytes, true);
  const Journal journal = Journal::start(span_of(mapping), sequence, snapshot);
  return {std::move(memory), std::move(mapping), journal};
}

Result<JournalFile> JournalFile::create(KeeperClient& keeper, uint64_t sequence,
                                        std::span<const std::byte> snapshot) {
  JournalFile file = make(sequence, snapshot);
  if (Status status = file.deposit(keeper); !status.ok()) return status;
  return file;
}

Result<JournalFile::Found> JournalFile::adopt(OwnFd fd) {
  const auto size_bytes = check_journal_fd(fd.get());
  if (!size_bytes) return size_bytes.status();
  SharedMapping mapping = SharedMapping::map(fd.get(), *size_bytes, true);
  auto contents = read_journal(span_of(mapping));
  if (!contents) return contents.status();
  const Journal journal = Journal::resume(span_of(mapping), *contents);
  return Found{JournalFile({std::move(fd), *size_bytes}, std::move(mapping), journal),
               std::move(*contents)};
}

Status JournalFile::checkpoint(KeeperClient& keeper, std::span<const std::byte> snapshot) {
  JournalFile next = make(last_sequence(), snapshot);
  Status status = next.deposit(keeper);
  // Without an answer it is unknown which of the two the keeper has.
  if (!status.ok() && status.code() != ErrorCode::kUnavailable) return status;
  next.num_checkpoints_ = num_checkpoints_ + 1;
  *this = std::move(next);
  return status;
}

Status JournalFile::deposit(KeeperClient& keeper) const {
  JournalMetadata metadata;
  metadata.size_bytes = memory_.size_bytes;
  std::array<uint8_t, 64> bytes;
  std::memcpy(bytes.data(), &metadata, sizeof metadata);
  return keeper.put(kKey, memory_.fd.get(), bytes);
}

}  // namespace larder::daemon
