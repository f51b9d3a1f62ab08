// FdWatch: runs a function once, when a descriptor becomes readable: a pidfd when its process has
// exited, the reading end of a pipe when nobody has the other end any more.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>

#include "larder/own_fd.h"

namespace larder::daemon {

class FdWatch {
 public:
  // The function does not run after the watch is gone. Thread rule: the loop's thread only.
  FdWatch(boost::asio::io_context& loop, OwnFd fd, std::function<void()> then)
      : state_(std::make_shared<State>(loop, std::move(fd), std::move(then))) {
    state_->descriptor.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                                  [state = state_](const boost::system::error_code& error) {
                                    if (!error && state->then) std::exchange(state->then, {})();
                                  });
  }
  FdWatch(FdWatch&&) noexcept = default;
  FdWatch& operator=(FdWatch&& other) noexcept {
    stop();
    state_ = std::move(other.state_);
    return *this;
  }
  ~FdWatch() { stop(); }

  int fd() { return state_->descriptor.native_handle(); }

 private:
  struct State {
    State(boost::asio::io_context& loop, OwnFd fd, std::function<void()> function)
        : descriptor(loop, fd.get()), then(std::move(function)) {
      fd.release();  // the descriptor object owns it from here on
    }
    boost::asio::posix::stream_descriptor descriptor;
    std::function<void()> then;
  };
  void stop() {
    if (state_ == nullptr) return;
    state_->then = {};
    boost::system::error_code ignored;
    state_->descriptor.close(ignored);
  }

  std::shared_ptr<State> state_;
};

}  // namespace larder::daemon
