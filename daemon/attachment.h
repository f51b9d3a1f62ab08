// What larderd attaches to sessions and pools in the state machine, as bytes: through it the
// journal keeps what a restarted larderd needs to know of them beside the machine's own state.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <sys/types.h>

#include "larder/status.h"
#include "protocol/messages.h"

namespace larder::daemon {

struct SessionRecord {
  protocol::SessionToken token = {};
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  std::string client_name;
  uint64_t arena_bytes = 0;
  bool notices = false;  // it has a notice socket and a lifeline
};

std::string to_attachment(const SessionRecord& record);
std::string to_attachment(const protocol::PoolSpec& spec);  // key offsets are inline
// INTERNAL when the bytes are none of this build's.
Result<SessionRecord> session_record(const std::string& attachment);
Result<protocol::PoolSpec> pool_spec(const std::string& attachment);

}  // namespace larder::daemon
