// Executors: larderd's executors, one for host memory and one for each GPU that has a pool.
//
// A call about a pool goes to the executor of its device; a session's ring is served by one of
// them. Thread rule: the loop's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/memory_devices.h"
#include "daemon/executor_link.h"

namespace larder::daemon {

class Executors {
 public:
  // As ExecutorLink::Handlers, of the executor of a device.
  struct Handlers {
    std::function<void(const std::string& device)> on_started;
    std::function<void(const std::string& device)> on_died;
    std::function<void(const protocol::Copied&)> on_copied;
    std::function<void(const protocol::BrokenRing&)> on_broken_ring;
    std::function<void(const protocol::ImportDone&)> on_imported;
  };

  Executors(boost::asio::io_context& loop, std::string executable, std::string log_level);

  // Executors of an earlier larderd, by id_of(device).
  void set_predecessors(std::map<uint64_t, OwnFd> pidfds);
  // Starts the host's, and those that of() has named by then.
  void start(Handlers handlers);
  // The executor of a device; made, and once start() was called started, when it is named first.
  ExecutorLink& of(const std::string& device);
  // Ends the executor of a GPU that has no pool any more: its context holds memory.
  void retire(const std::string& device);

  // Runs `then` when no executor has anything of the session.
  void when_idle_everywhere(uint64_t session, std::function<void()> then);
  void end_if_stuck(uint64_t session);
  void reap();           // now and then: retired ones that have exited
  bool may_run() const;  // any of them
  uint64_t restarts() const;
  std::vector<protocol::ExecutorInfo> list() const;
  // Why not everything can be served, or why a restart of larderd may help.
  std::optional<std::string> not_ready() const;
  std::optional<std::string> not_live() const;

  // What the keeper knows the executor of a device by: 0 is the host's.
  static uint64_t id_of(const std::string& device);

 private:
  ExecutorLink::Handlers handlers_of(const std::string& device);

  boost::asio::io_context& loop_;
  std::string executable_;
  std::string log_level_;
  Handlers handlers_;
  bool started_ = false;
  std::map<uint64_t, OwnFd> predecessors_;
  std::map<std::string, std::unique_ptr<ExecutorLink>> links_;
  std::vector<std::unique_ptr<ExecutorLink>> retired_;
  uint64_t retired_restarts_ = 0;
};

}  // namespace larder::daemon
