// Memories: what the simulated descriptors name. Each is a real memfd that holds nothing but the
// number of a Memory of this process, so that descriptors can be kept, duplicated and closed by the
// code under test, and it can be told what they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "larder/own_fd.h"

namespace larder::sim {

struct Memory {
  uint64_t number = 0;
  std::vector<uint64_t> blocks;  // of a segment: what is written in each of its blocks
  std::vector<std::byte> bytes;  // of a journal
};

class Memories {
 public:
  struct Made {
    OwnFd fd;
    Memory* memory;
  };
  Made make();
  // The memory that a descriptor names. It is a bug of the simulation if it names none.
  Memory& of(int fd);
  void forget(uint64_t number) { memories_.erase(number); }

 private:
  uint64_t last_ = 0;
  std::map<uint64_t, Memory> memories_;
};

OwnFd duplicate(int fd);
// A descriptor that is readable once signal() was called, as a pidfd is once its process has gone.
OwnFd make_signal();
void signal(int fd);
bool is_signalled(int fd);
// How many descriptors this process has open.
size_t open_descriptors();

}  // namespace larder::sim
