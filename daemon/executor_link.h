// ExecutorLink: larderd's hold on its executor process: start, restart, commands, reports.
//
// The executor is a child that may die at any time. A new one is told everything again by
// `on_started`, and what was under way is asked for again: drains by this class, copies by
// on_started. Thread rule: the loop's thread only.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "daemon/connection.h"
#include "daemon/fd_watch.h"
#include "protocol/executor_messages.h"

namespace larder::daemon {

class ExecutorLink {
 public:
  struct Handlers {
    std::function<void()> on_started;  // a fresh process: tell it pools, sessions, copies
    std::function<void()> on_ready;    // it serves
    std::function<void()> on_died;
    std::function<void(const protocol::Copied&)> on_copied;
    std::function<void(const protocol::BrokenRing&)> on_broken_ring;
    std::function<void(const protocol::ImportDone&)> on_imported;
  };

  // `device`: the GPU's UUID, empty for host memory.
  ExecutorLink(boost::asio::io_context& loop, std::string executable, std::string log_level,
               std::string device);
  ~ExecutorLink();  // closes the socket: the executor finishes its operation and exits

  // The executor of an earlier larderd, by its pidfd: none is started while it lives.
  void set_predecessor(OwnFd pidfd);
  void start(Handlers handlers);
  void stop();
  // Lets the executor exit by itself: nobody has work for it. What waits for its word is told that
  // nothing runs. The link is of no use any more, but must stay until has_left().
  void abandon();
  bool has_left();
  // Ends the executor, if one runs, and starts another.
  void restart();
  // Dropped while no executor runs; on_started sends what matters.
  void send(const protocol::ExecutorCommand& command, std::vector<OwnFd> fds = {});
  // Runs `then` when everything in the session's ring is done, by this executor or a later one.
  void when_idle(uint64_t session, std::function<void()> then);

  // Ends an executor that has left a drain of a closed session unanswered for too long.
  void end_if_stuck(uint64_t session);
  bool ready() const { return ready_; }
  // Whether any executor, an earlier larderd's too, may be running a call.
  bool may_run() const { return running() || predecessor_lives_; }
  int64_t pid() const { return running() ? pid_ : 0; }
  uint64_t restarts() const { return restarts_; }
  // Executors in a row that have died before they were ready.
  int failed_starts() const { return failed_starts_; }
  // So many that something is wrong which they cannot mend. What is asked of them is then refused
  // or skipped instead of waited for.
  bool cannot_start() const { return failed_starts_ >= kFailedStarts; }

 private:
  static constexpr int kFailedStarts = 3;
  bool running() const { return connection_ != nullptr; }
  void spawn();
  void handle(protocol::Received received);
  void died();
  void start_later();
  void after_predecessor();

  boost::asio::io_context& loop_;
  std::string executable_;
  std::string log_level_;
  std::string device_;
  Handlers handlers_;
  std::shared_ptr<Connection> connection_;
  boost::asio::steady_timer restart_timer_;
  struct Waiting {
    uint64_t session;
    std::function<void()> then;
    std::chrono::steady_clock::time_point since;
  };
  std::map<uint64_t, Waiting> drains_;  // by ticket
  uint64_t next_ticket_ = 1;
  int64_t pid_ = 0;
  int64_t leaving_pid_ = 0;  // after abandon()
  std::chrono::steady_clock::time_point left_at_;
  uint64_t restarts_ = 0;
  int deaths_in_a_row_ = 0;  // of executors that lived shortly
  int failed_starts_ = 0;
  std::chrono::steady_clock::time_point started_at_;
  OwnFd predecessor_;
  std::optional<FdWatch> predecessor_watch_;
  bool predecessor_lives_ = false;
  bool ready_ = false;
  bool stopping_ = false;
};

}  // namespace larder::daemon
