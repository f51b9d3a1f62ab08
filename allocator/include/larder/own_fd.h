// OwnFd: a file descriptor with one owner, closed when the owner goes.
#pragma once

#include <unistd.h>
#include <utility>

namespace larder {

class OwnFd {
 public:
  OwnFd() = default;
  explicit OwnFd(int fd) : fd_(fd) {}
  OwnFd(OwnFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnFd& operator=(OwnFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  OwnFd(const OwnFd&) = delete;
  OwnFd& operator=(const OwnFd&) = delete;
  ~OwnFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }  // no operator bool: 0 is a legal fd
  int release() { return std::exchange(fd_, -1); }
  // close(2) is not retried: on Linux the descriptor is gone even when it reports EINTR.
  void reset() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

}  // namespace larder
