// What DeviceCalls does besides calls: devices by name, captures, words, memory.
#include <atomic>

#include "tests/kernels/cuda/device_calls_support.h"

namespace larder::test {
namespace {

using namespace kernels;

TEST_CASE("text that is no UUID is refused, and so is a device that does not exist") {
  for (const char* text : {"", "GPU-", "0", "GPU-zz345678-1234-1234-1234-123456789012",
                           "GPU-12345678-1234-1234-1234-1234567890123"}) {
    const Result<std::unique_ptr<DeviceCalls>> refused = DeviceCalls::create(text);
    REQUIRE(!refused.ok());
    CHECK(refused.status().code() == ErrorCode::kInvalidArgument);
  }
  const std::string unknown = "GPU-00000000-0000-0000-0000-000000000001";
  const Result<std::unique_ptr<DeviceCalls>> refused = DeviceCalls::create(unknown);
  REQUIRE(!refused.ok());
  CHECK(refused.status().code() == ErrorCode::kUnavailable);
  MESSAGE(refused.status().to_string());
}

TEST_CASE("a device is found by any way to write its UUID, and the current device stays") {
  if (!has_gpu()) return;
  const std::string digits = first_gpu_uuid();
  std::string dashed = "GPU-" + digits;
  for (const size_t at : {12, 17, 22, 27}) dashed.insert(at, 1, '-');
  for (const std::string& text : {digits, "GPU-" + digits, dashed}) {
    const Result<std::unique_ptr<DeviceCalls>> calls = DeviceCalls::create(text);
    CHECK_MESSAGE(calls.ok(), calls.status().to_string());
  }
  int device = -1;
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK(device == 0);
}

TEST_CASE("device arrays and registered memory are there until they are let go") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  const std::vector<float> values = {1, 2, 3};
  Result<DeviceArray> array = calls->copy_to_device(values.data(), 12);
  REQUIRE(array.ok());
  std::vector<float> back(3);
  CHECK(cudaMemcpy(back.data(), array->memory.get(), 12, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(back == values);
  std::vector<std::byte> host(1 << 16);
  {
    Result<RegisteredMemory> first = calls->register_host_memory(host.data(), 1 << 16);
    REQUIRE_MESSAGE(first.ok(), first.status().to_string());
    CHECK(first->on_device != nullptr);
    CHECK(calls->register_host_memory(host.data(), 1 << 16).status().code() == ErrorCode::kBusy);
  }
  CHECK(calls->register_host_memory(host.data(), 1 << 16).ok());
  Result<DeviceMemoryInfo> info = calls->memory_info();
  REQUIRE(info.ok());
  CHECK(info->free_bytes > 0);
  CHECK(info->free_bytes <= info->total_bytes);
  CHECK(calls->copy_to_device(values.data(), 0).status().code() == ErrorCode::kInvalidArgument);
  CHECK(calls->copy_to_device(values.data(), -1).status().code() == ErrorCode::kInvalidArgument);
  calls.reset();  // the array outlives them
}

TEST_CASE("work waits for a word that another stream writes after its own work") {
  if (!has_gpu()) return;
  auto writer = open_gpu();
  auto reader = open_gpu();
  std::vector<uint64_t> host(512, 0);
  Result<RegisteredMemory> words = writer->register_host_memory(host.data(), 4096);
  REQUIRE_MESSAGE(words.ok(), words.status().to_string());
  constexpr size_t kBytes = 64 << 20;
  DeviceBytes from(std::vector<std::byte>(kBytes, std::byte{7}));
  DeviceBytes middle(kBytes);
  DeviceBytes to(kBytes);
  // The reader is enqueued first: only the word can make it wait.
  const Status waits = reader->wait_word(reader->stream(), host.data(), 5);
  if (waits.code() == ErrorCode::kUnsupported) {
    MESSAGE("skipped: " << waits.to_string());
    return;
  }
  CHECK_OK(waits);
  const auto copy = [](DeviceBytes& target, DeviceBytes& source, DeviceCalls& calls) {
    CHECK(cudaMemcpyAsync(target.data(), source.data(), kBytes, cudaMemcpyDeviceToDevice,
                          static_cast<cudaStream_t>(calls.stream())) == cudaSuccess);
  };
  copy(to, middle, *reader);
  CHECK(!reader->is_done());
  CHECK_OK(writer->write_word(writer->stream(), host.data(), 4));
  CHECK_OK(writer->wait());
  CHECK(!reader->is_done());
  copy(middle, from, *writer);
  CHECK_OK(writer->write_word(writer->stream(), host.data(), 6));
  CHECK_OK(writer->wait());
  CHECK(host[0] == 6);
  std::atomic_ref(host[0]).store(6);  // so that a failure does not hang here
  CHECK_OK(reader->wait());
  CHECK(reader->is_done());
  check_same("what the reader copied", to.read(), from.read());
  uint64_t pageable = 0;
  CHECK(writer->write_word(writer->stream(), &pageable, 1).code() == ErrorCode::kInvalidArgument);
  CHECK(writer->write_word(writer->stream(), nullptr, 1).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("a capture whose workspace is too small is refused, and works after one call") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  std::mt19937_64 engine = random_engine(101);
  Pool pool({1, 2, 16, 64, 64, KvFormat::kBf16, KvFormat::kBf16}, 8);
  fill(pool, engine);
  DevicePool device(pool);
  const DeviceBytes q(normal_values(engine, 4 * 64));
  const DeviceBytes out(4 * 64 * sizeof(float));
  const DeviceBytes q_lens(std::vector<int32_t>{1});
  const DeviceBytes seq_lens(std::vector<int32_t>{128});
  const DeviceBytes table(std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  AttendParams params;
  params.layer = device.layer;
  params.q = dense_tensor(q.data(), Dtype::kFp32, 1, 4, 64);
  params.output.out = dense_tensor(out.data(), Dtype::kFp32, 1, 4, 64);
  params.q_lens = q_lens.data<int32_t>();
  params.seq_lens = seq_lens.data<int32_t>();
  params.block_table = table.data<int32_t>();
  params.num_seqs = 1;
  params.block_table_stride = 8;
  params.num_splits = 4;
  Result<int64_t> needed = attend_workspace_bytes(params, Backend::kCuda);
  REQUIRE(needed.ok());
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  const Status refused = calls->attend_on(params, stream);
  CHECK(refused.code() == (*needed > 0 ? ErrorCode::kResourceExhausted : ErrorCode::kOk));
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);

  CHECK_OK(calls->attend_on(params, stream));
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  const std::vector<float> expected = out.read<float>();
  CHECK(!std::isnan(expected[0]));
  CHECK(cudaMemset(out.data(), 0xFF, out.size()) == cudaSuccess);
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK_OK(calls->attend_on(params, stream));
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  // A larger call takes a new workspace; the graph's stays.
  AttendParams larger = params;
  larger.num_splits = 4096;
  CHECK_OK(calls->attend_on(larger, stream));
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(cudaMemset(out.data(), 0xFF, out.size()) == cudaSuccess);
  CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  check_same("the graph's output", out.read<float>(), expected);
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

}  // namespace
}  // namespace larder::test
