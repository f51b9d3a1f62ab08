// JournalFile: the journal's memory (allocator/journal.h) as a sealed memfd that the keeper holds
// too, so that what was appended outlives this process.
//
// Appending is a store into shared memory and needs no call. A checkpoint begins a new memfd and
// puts it in the place of the old one in one step: whenever this process is killed, the keeper has
// either the old journal or the new one, and both say the same. Thread rule: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "allocator/journal.h"
#include "allocator/mapped_range.h"
#include "allocator/segment.h"
#include "daemon/keeper_client.h"
#include "larder/own_fd.h"
#include "larder/status.h"

namespace larder::daemon {

class JournalFile {
 public:
  // Under which the keeper has it.
  static constexpr uint64_t kKey = protocol::keeper_key(protocol::KeeperKind::kJournal, 0);

  // Room for records beside the snapshot, which may grow before the next checkpoint: at least
  // 32 MiB, else twice the snapshot and 16 MiB, in units of 2 MiB. Pages are taken when touched.
  static int64_t capacity_for(size_t snapshot_bytes);

  // A fresh journal that begins with the snapshot of everything up to `sequence` (at most
  // Journal::kMaxPayloadBytes), in a new memfd that replaces in one step whatever is under kKey.
  // Throws SystemError where there is no memory or descriptor.
  static Result<JournalFile> create(KeeperClient& keeper, uint64_t sequence,
                                    std::span<const std::byte> snapshot);

  struct Found;
  // Goes on with what the keeper had under kKey. INVALID_ARGUMENT for an fd that is no memfd, can
  // shrink or cannot be written; otherwise what read_journal() says. A refused file is left as it
  // is. Throws SystemError.
  static Result<Found> adopt(OwnFd fd);

  // False: full, and a checkpoint has to come first.
  [[nodiscard]] bool append(std::span<const std::byte> payload) { return journal_.append(payload); }

  // Goes on in a new memfd that begins with this snapshot of everything up to last_sequence().
  // After a refusal of the keeper nothing has changed: this file and the keeper have the old
  // journal. If the keeper does not answer (UNAVAILABLE), the new one is used all the same, and
  // until deposit() has succeeded a death of this process may lose what is appended. Throws
  // SystemError, and then nothing has changed.
  Status checkpoint(KeeperClient& keeper, std::span<const std::byte> snapshot);
  // Into a keeper that came back empty.
  Status deposit(KeeperClient& keeper) const;

  uint64_t last_sequence() const { return journal_.last_sequence(); }
  size_t used_bytes() const { return journal_.used_bytes(); }
  int64_t capacity_bytes() const { return memory_.size_bytes; }
  size_t num_records() const { return journal_.num_records(); }  // after the snapshot
  uint64_t num_checkpoints() const { return num_checkpoints_; }  // of this process
  int fd() const { return memory_.fd.get(); }

 private:
  JournalFile(Segment memory, SharedMapping mapping, Journal journal);
  static JournalFile make(uint64_t sequence, std::span<const std::byte> snapshot);

  Segment memory_;
  SharedMapping mapping_;
  Journal journal_;  // in mapping_
  uint64_t num_checkpoints_ = 0;
};

struct JournalFile::Found {
  JournalFile file;
  JournalContents contents;  // good until the file makes a checkpoint or goes
};

}  // namespace larder::daemon
