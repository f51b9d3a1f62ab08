// Which memory of which device is taken: a file that all processes share, under a lock. Memory is
// taken as long as any process has an fd or a mapping of it, which /proc tells; nobody has to say
// that it has let go, so a process may die at any moment. An fd that is on its way between two
// processes, and that neither has any more, is not seen.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>

namespace fake_cuda {

struct Memory {
  uint64_t filesystem = 0;  // st_dev and st_ino of the memfd: what it is known by
  uint64_t inode = 0;
  int64_t size_bytes = 0;
  int32_t device = 0;
  int32_t exportable = 0;  // 1 if an fd was asked for when it was created
  int32_t creator = 0;     // a process id
  int32_t padding = 0;
  uint64_t creator_start = 0;  // when it started: ids come again
  int64_t gone_since_ms = 0;   // when it was seen that nobody has it; 0 while somebody does
};

class Books {
 public:
  Books(const std::string& folder, int64_t reclaim_ms)
      : path_(folder + "/books"), reclaim_ms_(reclaim_ms) {}

  // A new memfd, or -1 where the device has not that much left.
  int take(int32_t device, int64_t size_bytes, bool exportable, int64_t limit_bytes) const;
  // The memory that an fd is; nothing for other files.
  std::optional<Memory> find(int fd) const;
  int64_t taken_bytes() const;

 private:
  std::string path_;
  int64_t reclaim_ms_;
};

}  // namespace fake_cuda
