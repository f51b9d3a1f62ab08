#include "tests/bench/gpu_timing.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <numeric>
#include <unistd.h>

#include "tests/bench/ceilings.h"

namespace larder::test {
namespace {

constexpr int64_t kBeyondCache = 256 * kMiB;
constexpr int64_t kCeilingBytes = 2 * kGiB;
constexpr int64_t kHostBytes = kGiB;
constexpr int kCeilingRounds = 11;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string output_of(const char* command) {
  std::string text;
  std::FILE* pipe = ::popen(command, "r");
  if (pipe == nullptr) return text;
  std::array<char, 256> part{};
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) text += part.data();
  return ::pclose(pipe) == 0 ? text.substr(0, text.find('\n')) : std::string();
}

// null where there is no such tool.
json clocks() {
  const std::string text = output_of(
      "nvidia-smi -i 0 --query-gpu=clocks.sm,power.draw,temperature.gpu"
      " --format=csv,noheader,nounits 2>/dev/null");
  double sm_mhz = 0, watts = 0, celsius = 0;
  if (std::sscanf(text.c_str(), "%lf, %lf, %lf", &sm_mhz, &watts, &celsius) != 3) return nullptr;
  return {{"sm_mhz", sm_mhz}, {"watts", watts}, {"celsius", celsius}};
}

json conditions(const BenchOptions& options) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0));
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver));
  check(cudaRuntimeGetVersion(&runtime));
  std::array<char, 32> date{};
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  std::strftime(date.data(), date.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return {
      {"date", date.data()},
      {"gpu", properties.name},
      {"multiprocessors", properties.multiProcessorCount},
      {"l2_bytes", properties.l2CacheSize},
      {"driver",
       output_of("nvidia-smi -i 0 --query-gpu=driver_version --format=csv,noheader 2>/dev/null")},
      {"cuda_driver", driver},
      {"cuda_runtime", runtime},
      {"cpus", ::sysconf(_SC_NPROCESSORS_ONLN)},
      {"commit", options.commit},
      {"replays", options.replays}};
}

// A captured graph of one launch per buffer.
cudaGraphExec_t make_graph(const Item& item, const Variant& variant, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int64_t buffer = 0; buffer < item.buffers; ++buffer) must(variant.launch(buffer, stream));
  check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, graph, 0));
  check(cudaGraphDestroy(graph));
  return executable;
}

json figures(const std::vector<double>& times_us) {
  return {{"us_median", median(times_us)},
          {"us_min", *std::min_element(times_us.begin(), times_us.end())},
          {"us_max", *std::max_element(times_us.begin(), times_us.end())}};
}

}  // namespace

int64_t buffers_for(int64_t bytes_per_call) {
  return std::clamp<int64_t>((512 * kMiB + bytes_per_call - 1) / bytes_per_call, 5, 256);
}

Bench::Bench(BenchOptions options) : options_(std::move(options)), flushed_(kBeyondCache) {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  check(cudaEventCreate(&begin_));
  check(cudaEventCreate(&end_));
  launch_fill(flushed_.data(), kBeyondCache, Fill::kBits, 1, stream_);
  before_ = measure_ceilings();
}

Bench::~Bench() {
  cudaEventDestroy(begin_);
  cudaEventDestroy(end_);
  cudaStreamDestroy(stream_);
}

bool Bench::wants(const std::string& label) const {
  return options_.filters.empty() ||
         std::any_of(options_.filters.begin(), options_.filters.end(),
                     [&](const auto& filter) { return label.find(filter) != std::string::npos; });
}

// Bytes per second of what the machine does at best; a copy counts what it reads and writes.
json Bench::measure_ceilings() {
  const DeviceMemory from(kCeilingBytes), to(kCeilingBytes);
  launch_fill(from.data(), kCeilingBytes, Fill::kBits, 2, stream_);
  std::byte* pinned = nullptr;
  check(cudaMallocHost(reinterpret_cast<void**>(&pinned), kHostBytes));
  const auto copy = [&](void* target, const void* source, int64_t bytes) {
    check(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_));
  };
  struct Ceiling {
    const char* name;
    int64_t bytes;
    std::function<void()> run;
  };
  const std::vector<Ceiling> ceilings = {
      {"copy_kernel", 2 * kCeilingBytes,
       [&] { launch_copy(to.data(), from.data(), kCeilingBytes, stream_); }},
      {"copy_memcpy", 2 * kCeilingBytes, [&] { copy(to.data(), from.data(), kCeilingBytes); }},
      {"read_kernel", kCeilingBytes,
       [&] { launch_read(from.data(), kCeilingBytes, to.as<uint32_t>(), stream_); }},
      {"to_device", kHostBytes, [&] { copy(to.data(), pinned, kHostBytes); }},
      {"to_host", kHostBytes, [&] { copy(pinned, from.data(), kHostBytes); }},
  };
  std::vector<std::vector<double>> rates(ceilings.size());
  for (int round = 0; round < kCeilingRounds + 1; ++round)
    for (size_t i = 0; i < ceilings.size(); ++i) {
      check(cudaEventRecord(begin_, stream_));
      ceilings[i].run();
      check(cudaEventRecord(end_, stream_));
      check(cudaEventSynchronize(end_));
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, begin_, end_));
      if (round > 0)  // the first one loads the kernels
        rates[i].push_back(static_cast<double>(ceilings[i].bytes) * 1e3 / milliseconds);
    }
  json result = {{"clocks", clocks()}};
  for (size_t i = 0; i < ceilings.size(); ++i) result[ceilings[i].name] = median(rates[i]);
  result["copy"] =
      std::max(result["copy_kernel"].get<double>(), result["copy_memcpy"].get<double>());
  check(cudaFreeHost(pinned));
  return result;
}

void Bench::end_group() {
  if (!groups_.empty() && !groups_.back().contains("after")) groups_.back()["after"] = clocks();
}

void Bench::begin_group(const std::string& name) {
  end_group();
  groups_.push_back({{"name", name}, {"before", clocks()}});
  std::fprintf(stderr, "%s\n", name.c_str());
}

// Microseconds per launch.
double Bench::replay_us(cudaGraphExec_t graph, int64_t launches, bool flush) {
  check(cudaGraphLaunch(graph, stream_));
  if (flush)
    launch_read(flushed_.data(), kBeyondCache, reinterpret_cast<uint32_t*>(flushed_.data()),
                stream_);
  check(cudaEventRecord(begin_, stream_));
  check(cudaGraphLaunch(graph, stream_));
  check(cudaEventRecord(end_, stream_));
  check(cudaEventSynchronize(end_));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin_, end_));
  return 1e3 * milliseconds / static_cast<double>(launches);
}

void Bench::measure(const Item& item) {
  std::vector<std::string> differences;
  for (const Variant& variant : item.variants) {
    item.poison();
    must(variant.launch(0, stream_));
    check(cudaStreamSynchronize(stream_));
    differences.push_back(item.difference());
  }
  const bool flush = item.buffers * (item.bytes_read + item.bytes_written) < kBeyondCache;
  std::vector<cudaGraphExec_t> graphs;
  for (const Variant& variant : item.variants) graphs.push_back(make_graph(item, variant, stream_));
  std::vector<std::vector<double>> times(graphs.size());
  std::vector<json> positions(graphs.size(), json::array());
  std::vector<size_t> order(graphs.size());
  std::iota(order.begin(), order.end(), 0);
  for (int round = 0; round < options_.replays; ++round) {
    std::shuffle(order.begin(), order.end(), order_);
    for (size_t turn = 0; turn < order.size(); ++turn) {
      const size_t i = order[turn];
      times[i].push_back(replay_us(graphs[i], item.buffers, flush));
      positions[i].push_back(turn);
    }
  }
  for (size_t i = 0; i < graphs.size(); ++i) {
    check(cudaGraphExecDestroy(graphs[i]));
    json result = item.fields;
    result.update(figures(times[i]));
    result.update({{"label", item.label},
                   {"row", item.variants[i].row},
                   {"buffers", item.buffers},
                   {"flushed", flush},
                   {"bytes_read", item.bytes_read},
                   {"bytes_written", item.bytes_written},
                   {"checked", differences[i].empty()},
                   {"order", positions[i]},
                   {"group", groups_.size() - 1}});
    if (!differences[i].empty()) {
      result["difference"] = differences[i];
      all_checked_ = false;
      std::fprintf(stderr, "%s, %s: %s\n", item.label.c_str(), item.variants[i].row.c_str(),
                   differences[i].c_str());
    }
    results_.push_back(std::move(result));
  }
}

void Bench::measure_host(const std::string& label, json fields, int64_t bytes,
                         const std::string& row, const std::function<void(int)>& body,
                         bool checked) {
  std::array<std::vector<double>, 2> times;
  std::array<json, 2> positions = {json::array(), json::array()};
  for (int round = 0; round < options_.replays; ++round) {
    const int first = static_cast<int>(order_() & 1);
    for (int turn = 0; turn < 2; ++turn) {
      const int which = turn == 0 ? first : 1 - first;
      const auto start = std::chrono::steady_clock::now();
      body(which);
      const std::chrono::duration<double, std::micro> spent =
          std::chrono::steady_clock::now() - start;
      times[static_cast<size_t>(which)].push_back(spent.count());
      positions[static_cast<size_t>(which)].push_back(turn);
    }
  }
  for (size_t which = 0; which < 2; ++which) {
    json result = fields;
    result.update(figures(times[which]));
    result.update({{"label", label},
                   {"row", which == 0 ? row : "one pinned copy"},
                   {"bytes_read", bytes},
                   {"bytes_written", bytes},
                   {"checked", checked},
                   {"order", positions[which]},
                   {"group", groups_.size() - 1},
                   {"share_of_pinned_copy", median(times[1]) / median(times[which])}});
    results_.push_back(std::move(result));
  }
  all_checked_ = all_checked_ && checked;
}

void Bench::skip(const std::string& label, json fields, const Status& reason) {
  fields.update({{"label", label}, {"skipped", reason.to_string()}});
  std::fprintf(stderr, "%s: skipped, %s\n", label.c_str(), reason.to_string().c_str());
  results_.push_back(std::move(fields));
}

void Bench::add(json result, bool checked) {
  results_.push_back(std::move(result));
  all_checked_ = all_checked_ && checked;
}

json Bench::finish() {
  end_group();
  const json after = measure_ceilings();
  const double copy = std::max(before_["copy"].get<double>(), after["copy"].get<double>());
  for (json& result : results_) {
    if (!result.contains("us_median")) continue;
    result["clocks"] = groups_[result["group"].get<size_t>()];
    if (result.contains("share_of_pinned_copy")) continue;
    const double bytes = result["bytes_read"].get<double>() + result["bytes_written"].get<double>();
    result["share_of_copy"] = bytes / (result["us_median"].get<double>() * 1e-6) / copy;
  }
  return {{"conditions", conditions(options_)},
          {"ceilings", {{"before", before_}, {"after", after}}},
          {"results", results_}};
}

}  // namespace larder::test
