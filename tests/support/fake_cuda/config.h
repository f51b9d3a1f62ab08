// What the environment says about the devices (see fake_cuda.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "allocator/cuda_abi.h"

namespace fake_cuda {

struct Config {
  std::string folder;
  std::vector<larder::cuda::Uuid> uuids;  // one per device
  int64_t memory_bytes = 0;               // of each device
  int64_t granularity_bytes = 0;
  int64_t reclaim_ms = 0;
  std::string without;

  bool has_device(int ordinal) const {
    return ordinal >= 0 && static_cast<size_t>(ordinal) < uuids.size();
  }
};

// Nothing, and a line on stderr, where it cannot be used.
std::optional<Config> read_config();

// A whole number from the environment.
int64_t environment_number(const char* name, int64_t otherwise);

}  // namespace fake_cuda
