// A session in a process of its own, which maps the pools' memory and runs the kernels itself.
//
// Both ends run the same code: the parent sends a step's JSON and the results it refers to, as CBOR
// after eight bytes of length, and the child parses and runs it with a LocalSession.
#pragma once

#include <memory>

#include "client/ctl/replay/child_process.h"
#include "client/ctl/replay/session.h"
#include "larder/own_fd.h"

namespace larder::replay {

class ProcessSession final : public Session {
 public:
  // Starts the child, which connects; refused as it is refused.
  static Result<std::unique_ptr<ProcessSession>> start(const SessionSettings& settings);
  Outcome run(const Step& step, const Context& context) override;
  // SIGKILL, and waits for the end.
  void kill();
  ~ProcessSession() override;  // lets the child say goodbye

 private:
  ProcessSession(ChildProcess child, OwnFd socket)
      : child_(std::move(child)), socket_(std::move(socket)) {}
  Outcome exchange(const json& message);

  ChildProcess child_;
  OwnFd socket_;
};

// The child's main: serves `socket` until the parent closes it. The exit status.
int serve_session(OwnFd socket);

// The descriptor that the child is given, and the hidden command that takes it.
inline constexpr int kSessionDescriptor = 3;
inline constexpr const char* kSessionCommand = "replay-session";

}  // namespace larder::replay
