// One call from a ring: from an untrusted record to a kernel launch, or to a refusal.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "allocator/mapped_range.h"
#include "allocator/memory_provider.h"
#include "allocator/types.h"
#include "client/group_view.h"
#include "kernels/device_calls.h"
#include "larder/status.h"
#include "protocol/arena.h"
#include "protocol/messages.h"

namespace larder::daemon {

// A group as the executor has it mapped.
struct MappedGroup {
  GroupView view;
  protocol::GroupLayout layout;
  std::unique_ptr<AddressRange> memory;
  SharedMapping owners;  // one ownership word per block (allocator/owner_word.h)
  // Of memory of a GPU: what runs calls there, the owners as it sees them, the view's key offsets.
  kernels::DeviceCalls* device = nullptr;
  kernels::RegisteredMemory device_owners = {};
  kernels::DeviceArray device_key_offsets = {};
  kernels::CallFaults* faults = nullptr;  // the executor's, which kernels can write
  kernels::CallFaults* device_faults = nullptr;
};

// Memory of a client that its records may name.
struct ImportedMemory {
  SharedMapping host;  // a memfd's
  kernels::RegisteredMemory registered = {};
  kernels::IpcMemory ipc = {};
  std::unique_ptr<AddressRange> range;  // of an exported CUDA allocation
  std::byte* base = nullptr;            // of what may be named, as the kernels see it
  uint64_t size_bytes = 0;
  bool on_host = false;  // the CPU can read it
};
using Imports = std::map<uint64_t, ImportedMemory>;

// What a call did, for the counters.
struct SubmissionWork {
  uint64_t appended_tokens = 0;
  uint64_t attended_rows = 0;
};

// Runs the call on `group`. The record has been copied to private memory; tables are copied here
// before they are looked at, and tensors are checked to lie in the arena or an import. Slots must
// be in blocks that `session` has open, and attended blocks open or published. INVALID_ARGUMENT,
// PERMISSION_DENIED (with the block) or UNSUPPORTED; nothing is written then.
Result<SubmissionWork> run_submission(const protocol::Submission& submission,
                                      const protocol::Arena& arena, const MappedGroup& group,
                                      SessionId session, const Imports& imports = {});

}  // namespace larder::daemon
