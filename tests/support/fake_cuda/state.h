// What one process has of the driver, and the gate that every entry point goes through first.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <sys/types.h>

#include "allocator/cuda_abi.h"
#include "tests/support/fake_cuda/books.h"
#include "tests/support/fake_cuda/config.h"

#define FAKE_CUDA_EXPORT __attribute__((visibility("default")))

namespace fake_cuda {

using larder::cuda::AccessDescription;
using larder::cuda::Address;
using larder::cuda::AllocationProperties;
using larder::cuda::Device;
using larder::cuda::MemoryHandle;
using larder::cuda::Result;
using larder::cuda::Uuid;

// Declared, so that a definition with other parameters does not compile.
extern "C" {
#define LARDER_CUDA_ENTRY(member, symbol, parameters) FAKE_CUDA_EXPORT Result symbol parameters;
LARDER_CUDA_ENTRIES(LARDER_CUDA_ENTRY)
#undef LARDER_CUDA_ENTRY
}

struct Handle {
  int fd;  // its own
  Memory memory;
};

struct Mapping {
  int64_t size_bytes;
  int32_t device;
};

// Guarded by `mutex`, which an entry point holds from beginning to end.
struct State {
  std::mutex mutex;
  std::optional<Config> config;  // set by cuInit
  pid_t initialized_by = 0;
  int64_t calls = 0;
  int64_t fail_first = 0;  // the numbers of the calls that fail; 0 for none
  int64_t fail_last = 0;
  Result fail_with = 0;
  MemoryHandle next_handle = 1;
  std::map<MemoryHandle, Handle> handles;
  std::map<Address, int64_t> reservations;  // sizes
  std::map<Address, Mapping> mappings;

  Books books() const { return {config->folder, config->reclaim_ms}; }
  bool aligned(unsigned long long value) const {
    return value % static_cast<unsigned long long>(config->granularity_bytes) == 0;
  }
};

// The one driver of this process.
State& state();

// Counts the call; whether it is one that has to fail, with `fail_with`.
bool count_call(State& state);
// Counts the call; what it has to return at once, if anything.
std::optional<Result> refuse(State& state);

}  // namespace fake_cuda
