#include "allocator/host_memory.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>

#include "larder/check.h"
#include "larder/system_error.h"

namespace larder {

Segment create_host_segment(const std::string& name, int64_t size_bytes) {
  LARDER_CHECK(size_bytes > 0, size_bytes);
  OwnFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid())
    throw SystemError("memfd_create(\"" + name + "\") for " + std::to_string(size_bytes) +
                      " bytes");
  if (::ftruncate(fd.get(), size_bytes) != 0)
    throw SystemError("ftruncate(memfd \"" + name + "\", " + std::to_string(size_bytes) +
                      " bytes)");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw SystemError("fcntl(memfd \"" + name + "\", F_ADD_SEALS)");
  return {std::move(fd), size_bytes};
}

Status check_host_segment(int fd, int64_t size_bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0)
    return {ErrorCode::kInvalidArgument,
            "fd " + std::to_string(fd) + ": " + std::generic_category().message(errno)};
  // Only memfds and files of shmem have seals: everything else answers EINVAL.
  const int seals = S_ISREG(status.st_mode) ? ::fcntl(fd, F_GET_SEALS) : -1;
  if (seals < 0) return {ErrorCode::kInvalidArgument, "fd " + std::to_string(fd) + " is no memfd"};
  if ((seals & F_SEAL_SHRINK) == 0)
    return {ErrorCode::kInvalidArgument, "fd " + std::to_string(fd) + " has seals " +
                                             std::to_string(seals) + ", but needs F_SEAL_SHRINK (" +
                                             std::to_string(F_SEAL_SHRINK) + ")"};
  if (size_bytes <= 0 || status.st_size != size_bytes)
    return {ErrorCode::kInvalidArgument, "fd " + std::to_string(fd) + " has " +
                                             std::to_string(status.st_size) + " bytes, but " +
                                             std::to_string(size_bytes) + " are stated"};
  return {};
}

}  // namespace larder
