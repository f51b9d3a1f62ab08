#include "tests/support/fake_cuda/books.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <set>
#include <sstream>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace fake_cuda {
namespace {

using Identity = std::pair<uint64_t, uint64_t>;  // file system and inode

int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// When a process started, in the system's ticks; 0 for one that has ended.
uint64_t start_of(int32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::stringstream text;
  text << file.rdbuf();
  // The second field is a name in brackets, which may hold anything; the 22nd is the start.
  const size_t name_end = text.str().rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.str().substr(name_end + 1));
  std::string field;
  for (int number = 3; number <= 22 && fields >> field; ++number)
    if (number == 3 && (field == "Z" || field == "X")) return 0;
  return std::strtoull(field.c_str(), nullptr, 10);
}

void add_fds(const std::string& process, std::set<Identity>& held) {
  DIR* const folder = ::opendir((process + "/fd").c_str());
  if (folder == nullptr) return;
  while (const dirent* const entry = ::readdir(folder)) {
    struct stat status {};
    if (::stat((process + "/fd/" + entry->d_name).c_str(), &status) == 0 && S_ISREG(status.st_mode))
      held.insert({status.st_dev, status.st_ino});
  }
  ::closedir(folder);
}

void add_mappings(const std::string& process, std::set<Identity>& held) {
  std::ifstream maps(process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned major = 0;
    unsigned minor = 0;
    unsigned long inode = 0;
    if (std::sscanf(line.c_str(), "%*s %*s %*s %x:%x %lu", &major, &minor, &inode) == 3 &&
        inode != 0)
      held.insert({makedev(major, minor), inode});
  }
}

std::set<Identity> held_by_anybody() {
  std::set<Identity> held;
  DIR* const processes = ::opendir("/proc");
  if (processes == nullptr) return held;
  while (const dirent* const entry = ::readdir(processes)) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    const std::string process = std::string("/proc/") + entry->d_name;
    add_fds(process, held);
    add_mappings(process, held);
  }
  ::closedir(processes);
  return held;
}

// The file, locked and read; written back when it has changed.
class OpenBooks {
 public:
  explicit OpenBooks(const std::string& path)
      : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (fd_ < 0 || ::flock(fd_, LOCK_EX) != 0) fail(path);
    struct stat status {};
    if (::fstat(fd_, &status) != 0) fail(path);
    memories.resize(static_cast<size_t>(status.st_size) / sizeof(Memory));
    const size_t size = memories.size() * sizeof(Memory);
    if (::pread(fd_, memories.data(), size, 0) != static_cast<ssize_t>(size)) fail(path);
  }
  OpenBooks(const OpenBooks&) = delete;
  OpenBooks& operator=(const OpenBooks&) = delete;
  ~OpenBooks() { ::close(fd_); }

  void write() const {
    const size_t size = memories.size() * sizeof(Memory);
    if (::pwrite(fd_, memories.data(), size, 0) != static_cast<ssize_t>(size) ||
        ::ftruncate(fd_, static_cast<off_t>(size)) != 0)
      fail("writing");
  }
  // What nobody has any more is free again: at once, or some time after its creator's death.
  void reclaim(int64_t after_ms) {
    const std::set<Identity> held = held_by_anybody();
    const int64_t now = now_ms();
    std::erase_if(memories, [&](Memory& memory) {
      if (held.contains({memory.filesystem, memory.inode})) return false;
      const bool dead = start_of(memory.creator) != memory.creator_start;
      if (!dead || after_ms == 0) return true;
      if (memory.gone_since_ms == 0) memory.gone_since_ms = now;
      return now - memory.gone_since_ms >= after_ms;
    });
  }
  int64_t taken(int32_t device) const {
    int64_t bytes = 0;
    for (const Memory& memory : memories)
      if (memory.device == device) bytes += memory.size_bytes;
    return bytes;
  }

  std::vector<Memory> memories;

 private:
  [[noreturn]] static void fail(const std::string& what) {
    std::perror(("fake_cuda: books: " + what).c_str());
    std::abort();
  }
  int fd_;
};

}  // namespace

int Books::take(int32_t device, int64_t size_bytes, bool exportable, int64_t limit_bytes) const {
  OpenBooks books(path_);
  if (size_bytes > limit_bytes - books.taken(device)) {
    books.reclaim(reclaim_ms_);
    books.write();
    if (size_bytes > limit_bytes - books.taken(device)) return -1;
  }
  const int fd = ::memfd_create("fake-cuda", MFD_CLOEXEC);
  struct stat status {};
  if (fd < 0 || ::ftruncate(fd, size_bytes) != 0 || ::fstat(fd, &status) != 0) {
    std::perror("fake_cuda: memfd");
    std::abort();
  }
  Memory memory{status.st_dev, status.st_ino, size_bytes, device, exportable ? 1 : 0};
  memory.creator = ::getpid();
  memory.creator_start = start_of(memory.creator);
  // An inode number that comes again: the memory that had it is gone.
  std::erase_if(books.memories, [&](const Memory& old) {
    return old.filesystem == memory.filesystem && old.inode == memory.inode;
  });
  books.memories.push_back(memory);
  books.write();
  return fd;
}

std::optional<Memory> Books::find(int fd) const {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  const OpenBooks books(path_);
  for (const Memory& memory : books.memories)
    if (memory.filesystem == status.st_dev && memory.inode == status.st_ino) return memory;
  return std::nullopt;
}

int64_t Books::taken_bytes() const {
  OpenBooks books(path_);
  books.reclaim(reclaim_ms_);
  books.write();
  int64_t bytes = 0;
  for (const Memory& memory : books.memories) bytes += memory.size_bytes;
  return bytes;
}

}  // namespace fake_cuda
