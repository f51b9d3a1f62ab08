// What pools on a GPU cost: segments, attaching, restarts, calls in process and on request, the
// check of owners, the executor.
//
//   gpu_bench [PART...] > gpu.json       once without MPS and once with an MPS server around it
//
// Raw figures go to stdout as JSON. Nothing is asserted about time; results are checked where there
// are any.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime_api.h>
#include <functional>
#include <signal.h>

#include "allocator/cuda_vmm.h"
#include "kernels/device_calls.h"
#include "larder/client.h"
#include "tests/bench/bench_node.h"

namespace larder::test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kHeads = 8, kDim = 128, kBlockTokens = 16;

void check(cudaError_t error) { LARDER_CHECK(error == cudaSuccess, cudaGetErrorString(error)); }

int64_t free_bytes() {
  size_t unused = 0, total = 0;
  check(cudaMemGetInfo(&unused, &total));
  return static_cast<int64_t>(unused);
}

std::vector<std::string> gpu_options() { return {"--device", "auto", "--memory-bytes", "130GiB"}; }

PoolOptions byte_pool(const std::string& name, int64_t num_blocks, Execution execution) {
  PoolOptions options;
  options.name = name;
  options.model = "bench@1";
  options.opaque_block_bytes = 2 * kMiB;
  options.geometry.block_tokens = kBlockTokens;
  options.num_blocks = num_blocks;
  options.execution = execution;
  return options;
}

PoolOptions kv_pool(Execution execution, int64_t num_blocks) {
  PoolOptions options;
  options.name = "kv";
  options.model = "bench@1";
  options.geometry = {1, kHeads, kBlockTokens, kDim, kDim, KvFormat::kNvfp4, KvFormat::kNvfp4};
  options.num_blocks = num_blocks;
  options.execution = execution;
  return options;
}

Client connect(const Daemons& daemons) {
  return must(
      Client::connect({.socket_path = daemons.socket(), .deadline = std::chrono::seconds(60)}));
}

template <typename Body>
std::vector<double> times(int rounds, const Body& body) {
  std::vector<double> result;
  for (int i = 0; i < rounds; ++i) {
    const auto start = Clock::now();
    body();
    result.push_back(us_since(start));
  }
  return result;
}

json bench_segments() {
  const auto driver = must(CudaDriver::load());
  const auto provider = must(CudaVmmProvider::open(driver, driver->devices()[0].uuid));
  json result;
  for (const int64_t mib : {2, 256, 1024}) {
    const int64_t size = mib * kMiB;
    const int rounds = 30;
    std::vector<Segment> segments;
    json one;
    one["create_and_export"] =
        show(times(rounds, [&] { segments.push_back(provider->create("bench", size)); }));
    auto range = provider->reserve(rounds * size);
    int64_t offset = 0;
    one["import_map_set_access"] = show(times(rounds, [&] {
      range->map_at(offset, segments[static_cast<size_t>(offset / size)].fd.get(), size);
      offset += size;
    }));
    offset = 0;
    one["unmap"] = show(times(rounds, [&] {
      range->unmap_at(offset, size);
      offset += size;
    }));
    one["close_fd"] = show(times(rounds, [&] { segments.pop_back(); }));
    result[std::to_string(mib) + "_mib"] = one;
  }
  return result;
}

// 100 GiB in 400 segments: made, mapped by an engine, and found again by the next larderd.
json bench_large_pool() {
  check(cudaFree(nullptr));
  Daemons daemons(gpu_options());
  Client client = connect(daemons);
  const int64_t num_blocks = 100 * 1024 / 2;
  const auto open = Clock::now();
  Pool pool = must(client.open_pool(byte_pool("large", num_blocks, Execution::kOnRequest)));
  json result = {{"bytes", num_blocks * 2 * kMiB}, {"open_us", us_since(open)}};
  const auto attach = Clock::now();
  (void)must(pool.data());
  result["attach_us"] = us_since(attach);
  Client second = connect(daemons);
  const auto whole = Clock::now();
  {
    Pool again = must(second.open_pool(byte_pool("large", num_blocks, Execution::kInProcess)));
    result["open_in_process_us"] = us_since(whole);
  }
  std::vector<double> restarts;
  const BlockHandle block = must(pool.allocate(1))[0];
  const uint64_t checksum = must(pool.checksum({&block.id, 1}))[0];
  for (int i = 0; i < 5; ++i) {
    daemons.kill_larderd();
    restarts.push_back(daemons.start_larderd_until_serving());
    LARDER_CHECK(must(pool.checksum({&block.id, 1}))[0] == checksum);
  }
  result["restart_to_serving"] = show(restarts);
  return result;
}

json bench_executor() {
  check(cudaFree(nullptr));
  Daemons daemons(gpu_options());
  Client client = connect(daemons);
  const int64_t before = free_bytes();
  Pool pool = must(client.open_pool(byte_pool("small", 1, Execution::kOnRequest)));
  const BlockHandle block = must(pool.allocate(1))[0];
  (void)must(pool.checksum({&block.id, 1}));
  return {{"footprint_bytes", before - free_bytes() - 2 * kMiB}};
}

// K and V of some tokens in device memory.
struct Rows {
  explicit Rows(int count) : num(count) {
    check(cudaMalloc(&memory, static_cast<size_t>(2 * bytes())));
    check(cudaMemset(memory, 0x3c, static_cast<size_t>(2 * bytes())));
  }
  ~Rows() { cudaFree(memory); }
  int64_t bytes() const { return int64_t{num} * kHeads * kDim * 2; }
  TensorView view(int which) const {
    return dense_tensor(static_cast<char*>(memory) + which * bytes(), Dtype::kBf16, num, kHeads,
                        kDim);
  }
  int num;
  void* memory = nullptr;
};

json bench_on_request() {
  check(cudaFree(nullptr));
  Daemons daemons(gpu_options());
  Client client = connect(daemons);
  Pool pool = must(client.open_pool(kv_pool(Execution::kOnRequest, 64)));
  const BlockHandle block = must(pool.allocate(1))[0];
  const int64_t slot = int64_t{block.id} * kBlockTokens;
  std::vector<uint16_t> host(2 * kHeads * kDim, 0x3c00);
  const auto k = dense_tensor(host.data(), Dtype::kBf16, 1, kHeads, kDim);
  const auto append = [&] { must(pool.append(0, k, k, {&slot, 1})); };
  (void)times(200, append);
  json result = {{"append_one_token", show(times(3000, append))}};
  // A kernel of ours, the executor's, and a kernel of ours again, ordered by words.
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  must(client.order_after(stream));
  void* scratch = nullptr;
  check(cudaMalloc(&scratch, 4096));
  const auto turn = [&] {
    check(cudaMemsetAsync(scratch, 1, 4096, stream));
    append();
    check(cudaMemsetAsync(scratch, 2, 4096, stream));
  };
  (void)times(200, turn);
  result["turn_ordered_by_words"] = show(times(3000, turn));
  check(cudaStreamSynchronize(stream));
  return result;
}

double gpu_us(cudaStream_t stream, int rounds, const std::function<void()>& body) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(begin, stream));
  for (int i = 0; i < rounds; ++i) body();
  check(cudaEventRecord(end, stream));
  check(cudaEventSynchronize(end));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return 1000.0 * milliseconds / rounds;
}

json bench_in_process() {
  check(cudaFree(nullptr));
  Daemons daemons(gpu_options());
  Client client = connect(daemons);
  Pool pool = must(client.open_pool(kv_pool(Execution::kInProcess, 64)));
  (void)must(pool.allocate(64));
  Rows rows(1);
  int64_t* slot = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&slot), sizeof *slot));
  check(cudaMemset(slot, 0, sizeof *slot));
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto append = [&] {
    must(pool.append_in_stream(0, rows.view(0), rows.view(1), slot, 1, stream));
  };
  (void)times(200, append);
  check(cudaStreamSynchronize(stream));
  json result = {{"host_per_call", show(times(1000, append))}};
  check(cudaStreamSynchronize(stream));
  result["gpu_per_call_us"] = gpu_us(stream, 1000, append);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < 32; ++i) append();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  result["gpu_per_call_in_a_graph_us"] =
      gpu_us(stream, 100, [&] { check(cudaGraphLaunch(executable, stream)); }) / 32;
  return result;
}

// An append of 32,768 tokens, with and without a look at each block's owner.
json bench_owner_check() {
  const int tokens = 32768;
  const auto driver = must(CudaDriver::load());
  auto calls = must(kernels::DeviceCalls::create(driver->devices()[0].uuid));
  check(cudaSetDevice(0));
  kernels::AppendParams params;
  params.layer.geometry = {1, kHeads, kBlockTokens, kDim, kDim, KvFormat::kNvfp4, KvFormat::kNvfp4};
  params.layer.page = page_layout(params.layer.geometry);
  params.layer.block_stride_bytes = params.layer.page.page_bytes;
  params.layer.num_blocks = tokens / kBlockTokens;
  check(cudaMalloc(reinterpret_cast<void**>(&params.layer.base),
                   static_cast<size_t>(params.layer.num_blocks * params.layer.block_stride_bytes)));
  Rows rows(tokens);
  params.k = rows.view(0);
  params.v = rows.view(1);
  std::vector<int64_t> slots(tokens);
  for (int i = 0; i < tokens; ++i) slots[static_cast<size_t>(i)] = tokens - 1 - i;
  const auto device_slots = must(calls->copy_to_device(slots.data(), tokens * 8));
  params.slots = reinterpret_cast<const int64_t*>(device_slots.memory.get());
  params.num_slots = tokens;
  std::vector<uint64_t> owners(static_cast<size_t>(params.layer.num_blocks), 5);
  const auto device_owners = must(calls->copy_to_device(owners.data(), std::ssize(owners) * 8));
  const auto host_owners = must(calls->register_host_memory(owners.data(), std::ssize(owners) * 8));
  auto* stream = static_cast<cudaStream_t>(calls->stream());
  const auto run = [&](const uint64_t* words) {
    const kernels::BlockRights rights{words, 5, 2};
    const auto body = [&] {
      must(calls->append_on(params, stream, words == nullptr ? nullptr : &rights));
    };
    (void)gpu_us(stream, 20, body);
    std::vector<double> medians;
    for (int i = 0; i < 20; ++i) medians.push_back(gpu_us(stream, 20, body));
    return show(medians);
  };
  const auto words = [](const std::byte* memory) {
    return reinterpret_cast<const uint64_t*>(memory);
  };
  json result = {{"tokens", tokens}};
  result["no_check"] = run(nullptr);
  result["owners_in_device_memory"] = run(words(device_owners.memory.get()));
  result["owners_in_host_memory"] = run(words(host_owners.on_device));
  cudaFree(params.layer.base);
  return result;
}

json device() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0));
  int driver = 0;
  check(cudaDriverGetVersion(&driver));
  return {{"name", properties.name}, {"driver", driver}};
}

int measure(const std::vector<std::string>& wanted) {
  const std::pair<const char*, std::function<json()>> parts[] = {
      {"segments", bench_segments},       {"executor", bench_executor},
      {"on_request", bench_on_request},   {"in_process", bench_in_process},
      {"owner_check", bench_owner_check}, {"large_pool", bench_large_pool},
  };
  json result = {{"conditions", conditions()}};
  result["conditions"]["gpu"] = device();
  result["conditions"]["mps"] = std::getenv("CUDA_MPS_PIPE_DIRECTORY") != nullptr;
  for (const auto& [name, part] : parts)
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end())
      result[name] = part();
  std::puts(result.dump(1).c_str());
  return 0;
}

}  // namespace
}  // namespace larder::test

int main(int argc, char** argv) {
  try {
    return larder::test::measure({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_bench: %s\n", error.what());
    return 1;
  }
}
