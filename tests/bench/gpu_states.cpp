#include "tests/bench/gpu_states.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <dlfcn.h>
#include <thread>

namespace larder::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxReplays = 1000;
constexpr double kBurstUs = 20'000;
constexpr std::chrono::seconds kPause(1);

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

DeviceMeter::DeviceMeter() {
  void* library = nullptr;
  for (const char* name : {"libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1"})
    if (library == nullptr) library = ::dlopen(name, RTLD_NOW);
  int (*init)() = nullptr;
  int (*device_at)(const char*, void**) = nullptr;
  if (library == nullptr || !find(library, "nvmlInit_v2", init) ||
      !find(library, "nvmlDeviceGetHandleByPciBusId_v2", device_at) ||
      !find(library, "nvmlDeviceGetClockInfo", clock_) ||
      !find(library, "nvmlDeviceGetPowerUsage", power_) ||
      !find(library, "nvmlDeviceGetTemperature", temperature_))
    return;
  int current = 0;
  std::array<char, 32> address{};
  check(cudaGetDevice(&current));
  check(cudaDeviceGetPCIBusId(address.data(), static_cast<int>(address.size()), current));
  if (init() != 0 || device_at(address.data(), &device_) != 0) device_ = nullptr;
}

json DeviceMeter::read() const {
  constexpr int kSmClock = 1;
  constexpr int kGpuSensor = 0;
  json result = {{"sm_mhz", nullptr}, {"watts", nullptr}, {"celsius", nullptr}};
  unsigned value = 0;
  if (device_ == nullptr) return result;
  if (clock_(device_, kSmClock, &value) == 0) result["sm_mhz"] = value;
  if (power_(device_, &value) == 0) result["watts"] = value / 1000.0;
  if (temperature_(device_, kGpuSensor, &value) == 0) result["celsius"] = value;
  return result;
}

StateTimer::StateTimer(cudaStream_t stream) : stream_(stream), events_(kMaxReplays + 1) {
  for (cudaEvent_t& event : events_) check(cudaEventCreate(&event));
}

StateTimer::~StateTimer() {
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
}

double StateTimer::once_us(cudaGraphExec_t graph) {
  float milliseconds = 0;
  check(cudaEventRecord(events_[0], stream_));
  check(cudaGraphLaunch(graph, stream_));
  check(cudaEventRecord(events_[1], stream_));
  check(cudaEventSynchronize(events_[1]));
  check(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]));
  return milliseconds * 1e3;
}

// All replays are queued before the first ends, so that the host is not measured.
StateSample StateTimer::timed(cudaGraphExec_t graph, int replays) {
  const auto count = static_cast<size_t>(std::min(replays, kMaxReplays));
  check(cudaEventRecord(events_[0], stream_));
  for (size_t i = 1; i <= count; ++i) {
    check(cudaGraphLaunch(graph, stream_));
    check(cudaEventRecord(events_[i], stream_));
  }
  StateSample sample;
  sample.device = meter_.read();
  check(cudaEventSynchronize(events_[count]));
  std::vector<double> times;
  for (size_t i = 1; i <= count; ++i) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]));
    times.push_back(milliseconds * 1e3);
  }
  std::sort(times.begin(), times.end());
  sample.us = times[times.size() / 2];
  sample.us_min = times.front();
  sample.us_max = times.back();
  return sample;
}

StateSample StateTimer::burst(cudaGraphExec_t graph) {
  const auto replays = static_cast<int>(std::clamp(kBurstUs / once_us(graph), 3.0, 21.0));
  std::this_thread::sleep_for(kPause);
  check(cudaGraphLaunch(graph, stream_));
  return timed(graph, replays);
}

StateSample StateTimer::sustained(cudaGraphExec_t graph, double seconds, int replays) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  check(cudaEventRecord(events_[1], stream_));
  // One replay is always queued behind the one that runs.
  for (size_t i = 0; Clock::now() < end; ++i) {
    check(cudaGraphLaunch(graph, stream_));
    check(cudaEventRecord(events_[i % 2], stream_));
    check(cudaEventSynchronize(events_[1 - i % 2]));
  }
  return timed(graph, replays);
}

}  // namespace larder::test
