#include "tests/simulation/memories.h"

#include <fcntl.h>
#include <filesystem>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "larder/check.h"
#include "larder/system_error.h"

namespace larder::sim {

Memories::Made Memories::make() {
  OwnFd fd(::memfd_create("larder-simulation", MFD_CLOEXEC));
  if (!fd.valid()) throw SystemError("memfd_create()");
  const uint64_t number = ++last_;
  if (::pwrite(fd.get(), &number, sizeof number, 0) != sizeof number) throw SystemError("pwrite()");
  Memory& memory = memories_[number];
  memory.number = number;
  return {std::move(fd), &memory};
}

Memory& Memories::of(int fd) {
  uint64_t number = 0;
  LARDER_CHECK(::pread(fd, &number, sizeof number, 0) == sizeof number, fd);
  const auto found = memories_.find(number);
  LARDER_CHECK(found != memories_.end(), number);
  return found->second;
}

OwnFd duplicate(int fd) {
  OwnFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) throw SystemError("fcntl(F_DUPFD_CLOEXEC)");
  return copy;
}

OwnFd make_signal() {
  OwnFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) throw SystemError("eventfd()");
  return fd;
}

void signal(int fd) {
  const uint64_t one = 1;
  LARDER_CHECK(::write(fd, &one, sizeof one) == sizeof one, fd);
}

bool is_signalled(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(open), end(open)));
}

}  // namespace larder::sim
