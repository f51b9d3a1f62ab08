// ExecutorLink: larderd's hold on its executor process: start, restart, commands, reports.
//
// The executor is a child that may die at any time. A new one is told everything again by
// `on_started`, and what was under way is repeated: drains are answered at once (nothing runs any
// more), copies are sent again. Thread rule: the loop's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "daemon/connection.h"
#include "protocol/executor_messages.h"

namespace larder::daemon {

class ExecutorLink {
 public:
  struct Handlers {
    std::function<void()> on_started;  // a fresh process: tell it pools, sessions, copies
    std::function<void()> on_ready;    // it serves
    // It died. `deaths_in_a_row` counts deaths without any progress in between.
    std::function<void(int deaths_in_a_row)> on_died;
    std::function<void(const protocol::Copied&)> on_copied;
    std::function<void(const protocol::Counters&)> on_counters;
    std::function<void(const protocol::BrokenRing&)> on_broken_ring;
  };

  ExecutorLink(boost::asio::io_context& loop, std::string executable, std::string log_level);
  ~ExecutorLink();  // closes the socket: the executor finishes its operation and exits

  void start(Handlers handlers);
  void stop();
  // Ends the executor, if one runs, and starts another.
  void restart();
  // Dropped while no executor runs; on_started sends what matters.
  void send(const protocol::ExecutorCommand& command, std::vector<OwnFd> fds = {});
  // Runs `then` when everything in the session's ring is done, at once if no executor runs.
  void when_idle(uint64_t session, std::function<void()> then);

  bool ready() const { return ready_; }
  int64_t pid() const { return running() ? pid_ : 0; }
  uint64_t restarts() const { return restarts_; }

 private:
  bool running() const { return connection_ != nullptr; }
  void spawn();
  void handle(protocol::Received received);
  void died();
  void start_later();
  void answer_drains();

  boost::asio::io_context& loop_;
  std::string executable_;
  std::string log_level_;
  Handlers handlers_;
  std::shared_ptr<Connection> connection_;
  boost::asio::steady_timer restart_timer_;
  std::map<uint64_t, std::function<void()>> drains_;  // by ticket
  uint64_t next_ticket_ = 1;
  int64_t pid_ = 0;
  uint64_t restarts_ = 0;
  int deaths_in_a_row_ = 0;
  bool ready_ = false;
  bool stopping_ = false;
};

}  // namespace larder::daemon
