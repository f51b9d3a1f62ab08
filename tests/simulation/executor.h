// Executor: the process larder-executor of the simulated node. It runs the copies that larderd
// sends it and the appends in the rings of sessions, one at a time; when its larderd has gone it
// finishes the one that it has begun, and exits.
#pragma once

#include <deque>
#include <optional>
#include <variant>

#include "tests/simulation/scene.h"

namespace larder::sim {

// One call in a session's ring: fill a block.
struct Append {
  BlockName block;
  uint64_t content;
};

class Executor {
 public:
  explicit Executor(Scene& scene)
      : scene_(scene), cache_(scene.cache), process_(++scene.last_pid) {}

  SimProcess& process() { return process_; }
  const SimProcess& process() const { return process_; }
  void add_copy(const RunCopy& copy) { queue_.push_back(copy); }
  void larderd_is_gone() { orphan_ = true; }
  bool orphan() const { return orphan_; }

  bool act();  // false: there is nothing to do
  bool works_on(const BlockName& name) const;
  bool works_for(const Client* client) const {
    return !process_.exited() && running_ && running_->client == client;
  }
  // Of fencing a session that never mapped memory.
  bool is_in_the_way(SessionId session) const {
    return !process_.exited() && (orphan_ || (running_ && running_->session == session));
  }
  bool is_idle() const { return !running_ && queue_.empty() && news_.empty(); }

  bool has_news() const { return !news_.empty(); }
  CopyDone take_news();

 private:
  struct Running {
    std::variant<RunCopy, Append> call;
    Client* client = nullptr;  // whose ring it is in
    SessionId session{0};
  };
  bool begin();
  void finish();
  void run(const RunCopy& copy);

  Scene& scene_;
  const uint64_t cache_;
  SimProcess process_;
  std::deque<RunCopy> queue_;
  std::optional<Running> running_;
  std::deque<CopyDone> news_;
  bool orphan_ = false;
};

}  // namespace larder::sim
