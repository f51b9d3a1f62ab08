#include "daemon/recovery.h"

#include <set>
#include <string>

#include "allocator/host_memory.h"
#include "allocator/memory_devices.h"
#include "daemon/attachment.h"

namespace larder::daemon {

using protocol::KeeperKind;

Result<Recovery> read_keeper(KeeperClient& keeper) {
  Result<std::vector<KeeperClient::Entry>> entries = keeper.list();
  if (!entries) return entries.status();
  Recovery recovery;
  OwnFd journal;
  for (KeeperClient::Entry& entry : *entries) {
    const uint64_t id = protocol::keeper_id(entry.key);
    switch (protocol::keeper_kind(entry.key)) {
      case KeeperKind::kJournal:
        journal = std::move(entry.fd);
        continue;
      case KeeperKind::kSegment:
        recovery.segments[id] = std::move(entry.fd);
        continue;
      case KeeperKind::kArena:
        recovery.sessions[id].arena = std::move(entry.fd);
        continue;
      case KeeperKind::kWakeUp:
        recovery.sessions[id].wake_up = std::move(entry.fd);
        continue;
      case KeeperKind::kProcess:
        recovery.sessions[id].process = std::move(entry.fd);
        continue;
      case KeeperKind::kLifeline:
        recovery.sessions[id].lifeline = std::move(entry.fd);
        continue;
      case KeeperKind::kExecutor:
        recovery.executors[id] = std::move(entry.fd);
        continue;
      case KeeperKind::kCounters:
        recovery.counters[id] = std::move(entry.fd);
        continue;
    }
    recovery.unknown.push_back(entry.key);
  }
  if (!journal.valid()) return recovery;
  Result<JournalFile::Found> found = JournalFile::adopt(std::move(journal));
  if (!found) return found.status();
  recovery.journal.emplace(std::move(*found));
  return recovery;
}

Status check_segments(const StateMachine& machine, const Recovery& recovery) {
  std::set<PoolId> on_host;
  for (const PoolRecord& record : machine.pool_records()) {
    const Result<protocol::PoolSpec> spec = pool_spec(record.attachment);
    if (!spec || spec->device.empty() || spec->device == kHostDevice) on_host.insert(record.pool);
  }
  for (const SegmentRecord& segment : machine.segments()) {
    const std::string name = "segment " + std::to_string(value(segment.segment)) + " (pool " +
                             std::to_string(value(segment.pool)) + ", group " +
                             std::to_string(segment.group) + ", extent " +
                             std::to_string(segment.index) + ")";
    const auto found = recovery.segments.find(value(segment.segment));
    if (found == recovery.segments.end())
      return {ErrorCode::kInternal, "the journal names " + name + " of " +
                                        std::to_string(segment.size_bytes) +
                                        " bytes, which the keeper does not hold"};
    if (!on_host.contains(segment.pool)) continue;
    if (Status status = check_host_segment(found->second.get(), segment.size_bytes); !status.ok())
      return {ErrorCode::kInternal, "the keeper's " + name + ": " + status.message()};
  }
  return {};
}

}  // namespace larder::daemon
