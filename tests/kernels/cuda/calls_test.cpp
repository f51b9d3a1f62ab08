// Calls that follow values on the device inside a captured graph, and pools past 4 GiB.
#include "tests/kernels/cuda/device_calls.h"

namespace larder::kernels {
namespace {

using test::AnyTensor;
using test::DeviceBytes;
using test::draw;
using test::TwinLayer;

constexpr int64_t kRows = 20;
constexpr int64_t kNumBlocks = 4;
constexpr AttentionGeometry kGeometry = {1, 3, 16, 64, 80, KvFormat::kNvfp4, KvFormat::kFp8E4m3};

// What an append and the gather of two sequences after it read and write.
struct Step {
  explicit Step(std::mt19937_64& engine)
      : k(Dtype::kBf16, kRows, 3, 64, true, engine),
        v(Dtype::kBf16, kRows, 3, 80, true, engine),
        k_out(Dtype::kFp32, 80, 3, 64, true, engine),
        v_out(Dtype::kFp16, 80, 3, 80, true, engine) {
    k.fill(engine);
    v.fill(engine);
    std::vector<int64_t> all(kNumBlocks * kGeometry.block_tokens);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    std::shuffle(all.begin(), all.end(), engine);
    slots.assign(all.begin(), all.begin() + kRows);
    slots[static_cast<size_t>(draw(engine, 0, kRows - 1))] = -1;
    for (int i = 0; i < 4; ++i)
      table.push_back(static_cast<int32_t>(draw(engine, 0, kNumBlocks - 1)));
    lens = {static_cast<int32_t>(draw(engine, 0, 32)), static_cast<int32_t>(draw(engine, 0, 32))};
  }
  AppendParams append(const LayerView& layer, std::byte* k_data, std::byte* v_data,
                      const int64_t* slots_data) const {
    return test::append_of(layer, k.view(k_data), v.view(v_data), slots_data, kRows);
  }
  GatherParams gather(const LayerView& layer, std::byte* k_data, std::byte* v_data,
                      const int32_t* table_data, const int32_t* lens_data) const {
    GatherParams params;
    params.layer = layer;
    params.k_out = k_out.view(k_data);
    params.v_out = v_out.view(v_data);
    params.block_table = table_data;
    params.seq_lens = lens_data;
    params.num_seqs = 2;
    params.block_table_stride = 2;
    return params;
  }
  AnyTensor k, v, k_out, v_out;
  std::vector<int64_t> slots;
  std::vector<int32_t> table, lens;
};

template <typename T>
void upload(const DeviceBytes& device, const std::vector<T>& values) {
  REQUIRE(cudaMemcpy(device.data(), values.data(), values.size() * sizeof(T),
                     cudaMemcpyHostToDevice) == cudaSuccess);
}

TEST_CASE("a captured append and gather follow slots, tables, lengths and values when replayed") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7401);
  CAPTURE(test::seed());
  TwinLayer layer(kGeometry, kNumBlocks, engine);
  layer.host().k_scale = 0.25f;
  layer.set_transform(KeyTransform::kRotated, engine);
  // Zeros decode to zeros: what was never written can be gathered.
  std::fill(layer.pool.bytes().begin(), layer.pool.bytes().end(), std::byte{0});
  const LayerView on_device = layer.device();
  test::PointOfUse use(kNumBlocks, false, engine);
  const Step first(engine);
  const DeviceBytes k(first.k.bytes), v(first.v.bytes), slots(first.slots);
  const DeviceBytes table(first.table), lens(first.lens);
  const DeviceBytes k_out(first.k_out.bytes), v_out(first.v_out.bytes);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  const Target target = use.target(stream);
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  test::check_ok(
      run_append(first.append(on_device, k.data(), v.data(), slots.data<int64_t>()), target));
  test::check_ok(run_gather(first.gather(on_device, k_out.data(), v_out.data(),
                                         table.data<int32_t>(), lens.data<int32_t>()),
                            target));
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  for (int replay = 0; replay < 5; ++replay) {
    CAPTURE(replay);
    Step step(engine);
    upload(k, step.k.bytes);
    upload(v, step.v.bytes);
    upload(slots, step.slots);
    upload(table, step.table);
    upload(lens, step.lens);
    upload(k_out, step.k_out.bytes);
    upload(v_out, step.v_out.bytes);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(cudaGraphLaunch(executable, stream) == cudaSuccess);
    test::check_ok(run_append(
        step.append(layer.host(), step.k.bytes.data(), step.v.bytes.data(), step.slots.data())));
    test::check_ok(
        run_gather(step.gather(layer.host(), step.k_out.bytes.data(), step.v_out.bytes.data(),
                               step.table.data(), step.lens.data())));
    for (const std::string& text : {test::differences(layer.read(), layer.pool.bytes()),
                                    test::differences(k_out.read(), step.k_out.bytes),
                                    test::differences(v_out.read(), step.v_out.bytes)})
      CHECK_MESSAGE(text.empty(), text);
  }
  use.check({});
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

// A pool of 5 GiB, of which the host knows the last two blocks.
struct LargePool {
  static constexpr int64_t kBlocks = 81921;
  static constexpr int64_t kStride = 65536;
  LargePool() {
    if (cudaMalloc(reinterpret_cast<void**>(&base), kBlocks * kStride) != cudaSuccess) {
      (void)cudaGetLastError();
      base = nullptr;
      MESSAGE("skipped: no " << kBlocks * kStride << " bytes of device memory");
      return;
    }
    REQUIRE(cudaMemset(base, 0xFF, kBlocks * kStride) == cudaSuccess);
  }
  LargePool(const LargePool&) = delete;
  LargePool& operator=(const LargePool&) = delete;
  ~LargePool() { cudaFree(base); }
  std::vector<std::byte> read(int64_t block) const {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    std::vector<std::byte> bytes(kStride);
    REQUIRE(cudaMemcpy(bytes.data(), base + block * kStride, kStride, cudaMemcpyDeviceToHost) ==
            cudaSuccess);
    return bytes;
  }
  std::byte* base = nullptr;
};

TEST_CASE("blocks past 4 GiB are written, read, copied, scrubbed and summed where they lie") {
  if (!test::has_gpu()) return;
  const LargePool pool;
  if (pool.base == nullptr) return;
  auto engine = test::random_engine(7402);
  CAPTURE(test::seed());
  constexpr int64_t kLast = LargePool::kBlocks - 1;
  const AttentionGeometry geometry = {1, 8, 16, 128, 128, KvFormat::kBf16, KvFormat::kBf16};
  test::Pool host(geometry, 1);
  REQUIRE(host.layer().page.page_bytes == LargePool::kStride);
  AnyTensor rows(Dtype::kBf16, 16, 8, 128, true, engine);
  rows.fill(engine);
  std::vector<int64_t> slots, host_slots;
  for (int64_t i = 0; i < 16; ++i) {
    host_slots.push_back(i);
    slots.push_back(kLast * 16 + i);
  }
  const DeviceBytes device_rows(rows.bytes), device_slots(slots), out(rows.bytes.size());
  test::PointOfUse use(LargePool::kBlocks, false, engine);
  LayerView layer = host.layer();
  layer.base = pool.base;
  layer.num_blocks = LargePool::kBlocks;
  const TensorView source = rows.view(device_rows.data());
  test::check_ok(run_append(
      test::append_of(layer, source, source, device_slots.data<int64_t>(), 16), use.target()));
  test::check_ok(
      run_append(test::append_of(host.layer(), rows.host(), rows.host(), host_slots.data(), 16)));
  CHECK(test::differences(pool.read(kLast), host.bytes()) == "");
  GatherParams gather;
  gather.layer = layer;
  gather.v_out = rows.view(out.data());
  gather.slots = device_slots.data<int64_t>();
  gather.num_slots = 16;
  test::check_ok(run_gather(gather, use.target()));
  CHECK(test::differences(out.read(), rows.bytes) == "");
  const BlocksView view = {pool.base, LargePool::kStride, 0, LargePool::kStride,
                           1,         LargePool::kBlocks};
  const std::vector<int32_t> last = {static_cast<int32_t>(kLast)};
  const std::vector<int32_t> before = {static_cast<int32_t>(kLast - 1)};
  const DeviceBytes device_last(last), device_before(before), sum(sizeof(uint64_t));
  test::check_ok(run_copy({view, device_last.data<int32_t>(), device_before.data<int32_t>(), 1},
                          use.target()));
  test::check_ok(run_scrub({view, device_last.data<int32_t>(), 1}, use.target()));
  test::check_ok(
      run_checksum({view, device_before.data<int32_t>(), 1, sum.data<uint64_t>()}, use.target()));
  CHECK(test::differences(pool.read(kLast - 1), host.bytes()) == "");
  CHECK(pool.read(kLast) == std::vector<std::byte>(LargePool::kStride));
  // Nothing where offsets would be if they were cut to 32 bits.
  const std::vector<std::byte> poison(LargePool::kStride, std::byte{0xFF});
  for (const int64_t block : {kLast & 0xFFFF, (kLast - 1) & 0xFFFF, (kLast & 0x7FFF)})
    CHECK(test::differences(pool.read(block), poison) == "");
  const int32_t zero = 0;
  uint64_t expected = 0;
  test::check_ok(
      run_checksum({{host.bytes().data(), 0, 0, LargePool::kStride, 1, 1}, &zero, 1, &expected}));
  CHECK(sum.read<uint64_t>()[0] == expected);
  use.check({});
}

}  // namespace
}  // namespace larder::kernels
