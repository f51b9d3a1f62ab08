// Graphs timed in two states of the GPU, since arithmetic-heavy kernels slow down once power or
// temperature lowers the clocks, some 30 ms of full load on: `burst` is the first replays after a
// pause, `sustained` is after seconds of the same graph, back to back.
#pragma once

#include <cuda_runtime_api.h>
#include <string>
#include <vector>

#include "tests/bench/gpu_timing.h"

namespace larder::test {

// What NVML says of the current device; all null where there is no NVML.
class DeviceMeter {
 public:
  DeviceMeter();
  // sm_mhz is of this moment, watts a mean over the last second on some GPUs.
  json read() const;

 private:
  void* device_ = nullptr;
  int (*clock_)(void*, int, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
  int (*temperature_)(void*, int, unsigned*) = nullptr;
};

// Times of one graph in one state.
struct StateSample {
  double us = 0;  // median of a replay
  double us_min = 0;
  double us_max = 0;
  json device;  // while it was measured
};

class StateTimer {
 public:
  explicit StateTimer(cudaStream_t stream);
  ~StateTimer();
  StateTimer(const StateTimer&) = delete;
  StateTimer& operator=(const StateTimer&) = delete;

  // After a pause of a second and one untimed replay: replays of 20 ms in all, 3 at least.
  StateSample burst(cudaGraphExec_t graph);
  // After `seconds` of load: `replays` more without a gap.
  StateSample sustained(cudaGraphExec_t graph, double seconds, int replays);

 private:
  double once_us(cudaGraphExec_t graph);
  StateSample timed(cudaGraphExec_t graph, int replays);

  cudaStream_t stream_;
  std::vector<cudaEvent_t> events_;
  DeviceMeter meter_;
};

}  // namespace larder::test
