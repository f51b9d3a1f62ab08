// What the tests of nodes on a GPU share.
#pragma once

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tests/gpu/byte_pool.h"
#include "tests/gpu/gpu_kernels.h"
#include "tests/support/gpu.h"
#include "tests/support/node.h"

namespace larder::test {

// Pools that name no device are on the first GPU.
inline std::vector<std::string> gpu_options(std::vector<std::string> more = {},
                                            const std::string& memory = "128GiB") {
  std::vector<std::string> options = {"--device", "auto", "--memory-bytes", memory};
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

template <typename Value>
Value must(Result<Value> result) {
  if (!result) FAIL(result.status().to_string());
  return std::move(*result);
}
inline void must(const Status& status) {
  if (!status.ok()) FAIL(status.to_string());
}

// Lets the GPU be busy for so long: where nothing may happen meanwhile, there is no condition to
// look for.
inline void pass_time(int64_t milliseconds) {
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  spin(stream, 1000 * milliseconds);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  cudaStreamDestroy(stream);
}

inline int64_t free_device_bytes() {
  size_t free_bytes = 0, total_bytes = 0;
  REQUIRE(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess);
  return static_cast<int64_t>(free_bytes);
}

// pids that the driver knows a context of.
inline std::vector<pid_t> compute_processes() {
  const Output output =
      run({"/usr/bin/env", "nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"});
  std::vector<pid_t> pids;
  std::istringstream lines(output.stdout_text);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty() && std::isdigit(static_cast<unsigned char>(line[0])))
      pids.push_back(std::stoi(line));
  return pids;
}

inline bool contains(const std::vector<pid_t>& pids, pid_t pid) {
  return std::find(pids.begin(), pids.end(), pid) != pids.end();
}

}  // namespace larder::test
