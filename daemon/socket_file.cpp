#include "daemon/socket_file.h"

#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <grp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/heirs.h"
#include "larder/system_error.h"
#include "protocol/channel.h"

namespace larder::daemon {
namespace {

constexpr int kBacklog = 128;
constexpr auto kProbeDeadline = std::chrono::seconds(1);

std::string read_pid(int lock) {
  char text[32] = {};
  const ssize_t size = ::pread(lock, text, sizeof text - 1, 0);
  return size > 0 ? std::string(text, strcspn(text, "\n")) : "unknown";
}

// A lock on a file that has lost its name to a faster starter is worth nothing.
bool still_named(int lock, const std::string& path) {
  struct stat held {};
  struct stat named {};
  return ::fstat(lock, &held) == 0 && ::stat(path.c_str(), &named) == 0 &&
         held.st_ino == named.st_ino && held.st_dev == named.st_dev;
}

Result<OwnFd> take_lock(const std::string& path) {
  OwnFd lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) throw SystemError("open(" + path + ")");
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) throw SystemError("flock(" + path + ")");
    return Status(ErrorCode::kBusy,
                  "already running: " + path + " is held by pid " + read_pid(lock.get()));
  }
  if (!still_named(lock.get(), path))
    return Status(ErrorCode::kBusy, "already running: " + path + " was taken at the same moment");
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(lock.get(), 0) != 0 ||
      ::pwrite(lock.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size()))
    throw SystemError("write(" + path + ")");
  return lock;
}

// Under the lock: removes a stale socket, refuses anything else.
Status clear_path(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return {};
    throw SystemError("lstat(" + path + ")");
  }
  if (!S_ISSOCK(info.st_mode))
    return {ErrorCode::kInvalidArgument, path + " exists and is not a socket; it is left alone"};
  const auto probe =
      protocol::connect_before(path, std::chrono::steady_clock::now() + kProbeDeadline);
  if (probe.ok() || probe.status().code() == ErrorCode::kDeadlineExceeded)
    return {ErrorCode::kBusy, "already running: somebody answers at " + path};
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw SystemError("unlink(" + path + ")");
  return {};
}

// The lock of a path that can be bound now.
Result<OwnFd> take_path(const std::string& path) {
  Result<OwnFd> lock = take_lock(path + ".lock");
  if (!lock) return lock;
  if (Status status = clear_path(path); !status.ok()) return status;
  return lock;
}

Status set_group(const std::string& path, const std::string& group) {
  if (group.empty()) return {};
  const ::group* entry = ::getgrnam(group.c_str());
  if (entry == nullptr)
    return {ErrorCode::kInvalidArgument, "socket_group \"" + group + "\" does not exist"};
  if (::chown(path.c_str(), static_cast<uid_t>(-1), entry->gr_gid) != 0)
    throw SystemError("chown(" + path + ", group " + group + ")");
  return {};
}

OwnFd bind_and_listen(const std::string& path) {
  OwnFd listener = protocol::make_socket();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  // Nobody may connect before the mode is set: bind creates the file with the umask's mode.
  const mode_t old_mask = ::umask(0777);
  const int bound =
      ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  const int error = errno;
  ::umask(old_mask);
  if (bound != 0) throw SystemError("bind(" + path + ")", error);
  if (::listen(listener.get(), kBacklog) != 0) throw SystemError("listen(" + path + ")");
  return listener;
}

}  // namespace

Result<SocketFile> SocketFile::bind(const std::string& path, mode_t mode,
                                    const std::string& group) {
  sockaddr_un address{};
  if (path.empty() || path.size() >= sizeof address.sun_path)
    return Status(ErrorCode::kInvalidArgument, "socket path \"" + path + "\" has " +
                                                   std::to_string(path.size()) + " bytes, 1 to " +
                                                   std::to_string(sizeof address.sun_path - 1) +
                                                   " are allowed");
  Result<OwnFd> lock = Status(ErrorCode::kBusy, "already running: " + path);
  await_heirs([&] {
    lock = take_path(path);
    return lock.status().code() == ErrorCode::kBusy;
  });
  if (!lock) return lock.status();
  SocketFile file(path, std::move(*lock), bind_and_listen(path));
  if (Status status = set_group(path, group); !status.ok()) return status;
  if (::chmod(path.c_str(), mode) != 0) throw SystemError("chmod(" + path + ")");
  return file;
}

SocketFile::SocketFile(std::string path, OwnFd lock, OwnFd listener)
    : path_(std::move(path)), lock_(std::move(lock)), listener_(std::move(listener)) {}

SocketFile::SocketFile(SocketFile&& other) noexcept
    : path_(std::move(other.path_)),
      lock_(std::move(other.lock_)),
      listener_(std::move(other.listener_)) {}

SocketFile::~SocketFile() {
  if (!lock_.valid()) return;
  ::unlink(path_.c_str());
  // The lock file goes last and while it is locked.
  ::unlink((path_ + ".lock").c_str());
}

}  // namespace larder::daemon
