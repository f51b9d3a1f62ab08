// The listening socket's file: who may bind it, and what is done with what an earlier run left.
#pragma once

#include <string>
#include <sys/types.h>

#include "larder/own_fd.h"
#include "larder/status.h"

namespace larder::daemon {

// Binds and listens at `path` with the given mode, whatever the umask. A lock file beside it
// ("PATH.lock") is held for the life of the object, so that of many starters exactly one wins and
// a stale socket is replaced only by the one who holds the lock. Both files go with the object.
class SocketFile {
 public:
  // BUSY, after 2 s: somebody holds the lock (the message has the pid) or answers at `path`. What
  // a killed process's child still holds is waited for.
  // INVALID_ARGUMENT: the path is too long, or something that is no socket is there (it is left
  // alone), or `group` (empty: the process's own) does not exist. Throws SystemError.
  static Result<SocketFile> bind(const std::string& path, mode_t mode = 0660,
                                 const std::string& group = "");
  SocketFile(SocketFile&& other) noexcept;
  SocketFile& operator=(SocketFile&&) = delete;
  ~SocketFile();

  int fd() const { return listener_.get(); }
  const std::string& path() const { return path_; }

 private:
  SocketFile(std::string path, OwnFd lock, OwnFd listener);
  std::string path_;
  OwnFd lock_;
  OwnFd listener_;
};

}  // namespace larder::daemon
