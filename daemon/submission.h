// One call from a ring: from an untrusted record to a kernel launch, or to a refusal.
#pragma once

#include <cstdint>
#include <span>

#include "allocator/mapped_range.h"
#include "allocator/types.h"
#include "client/group_view.h"
#include "larder/status.h"
#include "protocol/arena.h"
#include "protocol/messages.h"

namespace larder::daemon {

// A group as the executor has it mapped.
struct MappedGroup {
  GroupView view;
  protocol::GroupLayout layout;
  MappedRange memory;
  SharedMapping owners;  // one ownership word per block (allocator/owner_word.h)
};

// What a call did, for the counters.
struct SubmissionWork {
  uint64_t appended_tokens = 0;
  uint64_t attended_rows = 0;
};

// Runs the call on `group`. The record has been copied to private memory; tables are copied here
// before they are looked at, and tensors are checked to lie in the arena. Slots must be in blocks
// that `session` has open, and attended blocks open or published. INVALID_ARGUMENT,
// PERMISSION_DENIED (with the block) or UNSUPPORTED; nothing is written then.
Result<SubmissionWork> run_submission(const protocol::Submission& submission,
                                      const protocol::Arena& arena, const MappedGroup& group,
                                      SessionId session);

}  // namespace larder::daemon
