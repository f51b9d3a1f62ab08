// Plain calls of DeviceCalls with RoPE, slots of 32 bits, further layers and first tokens, with
// memory of each kind, against the CPU row.
#include <memory>

#include "tests/kernels/cuda/device_calls_support.h"

namespace larder::test {
namespace {

using namespace kernels;

constexpr AttentionGeometry kGeometry = {1, 2, 16, 64, 32, KvFormat::kNvfp4, KvFormat::kFp8E4m3};
constexpr int64_t kRows = 12;
constexpr int64_t kTableRows = 1000;

// Three layers on the host and on the device, and their rows.
struct ThreeLayers {
  explicit ThreeLayers(std::mt19937_64& engine) {
    for (int i = 0; i < 3; ++i) {
      pools.push_back(std::make_unique<Pool>(kGeometry, 4, std::byte{0xFF}, 7));
      pools.back()->layer().k_scale = 0.3f + static_cast<float>(i);
      pools.back()->layer().v_scale = 2.0f - 0.5f * static_cast<float>(i);
      devices.push_back(std::make_unique<DevicePool>(*pools.back()));
      k.push_back(to_dtype(normal_values(engine, kRows * 2 * 64), Dtype::kBf16));
      v.push_back(to_dtype(normal_values(engine, kRows * 2 * 32), Dtype::kBf16));
    }
    cache = to_dtype(normal_values(engine, kTableRows * 64), Dtype::kFp32);
  }
  // The CPU's bytes, layer by layer, which then lie in the pools.
  void run_on_cpu(AppendParams params) {
    for (size_t i = 0; i < 3; ++i) {
      params.layer = pools[i]->layer();
      params.k = dense_tensor(k[i].data(), Dtype::kBf16, kRows, 2, 64);
      params.v = dense_tensor(v[i].data(), Dtype::kBf16, kRows, 2, 32);
      CHECK_OK(run_append(params));
    }
  }
  void check() const {
    for (size_t i = 0; i < 3; ++i)
      check_same("layer " + std::to_string(i), devices[i]->memory.read(), pools[i]->bytes());
  }
  std::vector<std::unique_ptr<Pool>> pools;
  std::vector<std::unique_ptr<DevicePool>> devices;
  std::vector<std::vector<std::byte>> k, v;
  std::vector<std::byte> cache;  // rows of 64 floats, the cosines in front
};

void set_tables(Rope& rope, const std::byte* cache) {
  rope.cos = cache;
  rope.sin = cache + 32 * sizeof(float);
  rope.table_dtype = Dtype::kFp32;
  rope.table_stride = 64;
  rope.table_rows = kTableRows;
}

// `elsewhere`: of the last layer's keys, so that layers may lie apart.
void run_case(DeviceCalls& calls, Where where, Where elsewhere, Where tables, bool with_tables,
              bool with_positions) {
  CAPTURE(name(where));
  CAPTURE(name(elsewhere));
  CAPTURE(name(tables));
  CAPTURE(with_tables);
  CAPTURE(with_positions);
  std::mt19937_64 engine = random_engine(211);
  ThreeLayers layers(engine);
  std::vector<int32_t> slots = {63, 5, 17, 5, -1, 0, 5, 40, -3, 17, 18, 19};
  std::vector<int64_t> positions = {0, 999, 1, 5, -77, 6, 7, 8, -1, 500, 501, 2};
  AppendParams params;
  params.slots32 = slots.data();
  params.num_slots = kRows;
  params.rope.dim = 64;
  if (with_positions) params.rope.positions = positions.data();
  if (with_tables) set_tables(params.rope, layers.cache.data());
  layers.run_on_cpu(params);

  std::vector<std::unique_ptr<Placed>> placed;
  std::vector<FurtherLayer> further(2);
  for (size_t i = 0; i < 3; ++i) {
    placed.push_back(std::make_unique<Placed>(layers.k[i], i == 2 ? elsewhere : where, calls));
    std::byte* k = placed.back()->data();
    placed.push_back(std::make_unique<Placed>(layers.v[i], where, calls));
    std::byte* v = placed.back()->data();
    const LayerView& layer = layers.devices[i]->layer;
    if (i == 0) {
      params.layer = layer;
      // Staged rows are dense, those that are used where they lie need not be.
      params.k = dense_tensor(k, Dtype::kBf16, kRows, 2, 64);
      params.v = dense_tensor(v, Dtype::kBf16, kRows, 2, 32);
    } else {
      further[i - 1] = {layer.base, k, v, nullptr, layer.k_scale, layer.v_scale};
    }
  }
  params.further_layers = further.data();
  params.num_further_layers = 2;
  Placed cache(layers.cache, tables, calls);
  if (with_tables) set_tables(params.rope, cache.data());
  CHECK_OK(calls.append(params));
  // Tables on the host have been copied.
  std::fill(slots.begin(), slots.end(), 1);
  std::fill(positions.begin(), positions.end(), 3);
  CHECK_OK(calls.wait());
  layers.check();
}

TEST_CASE("append turns keys and writes three layers, wherever rows and tables lie") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  for (const Where where : kEverywhere)
    for (const Where elsewhere : kEverywhere) {
      run_case(*calls, where, elsewhere, where, false, true);
      for (const Where tables : kEverywhere)
        for (const bool with_positions : {true, false})
          run_case(*calls, where, elsewhere, tables, true, with_positions);
    }
}

TEST_CASE("layers whose rows lie apart with other strides once staged are written one by one") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  std::mt19937_64 engine = random_engine(212);
  ThreeLayers layers(engine);
  const std::vector<int64_t> slots = {63, 5, 17, -1, 1, 0, 2, 40, -3, 16, 18, 19};
  AppendParams params;
  params.slots = slots.data();
  params.num_slots = kRows;
  layers.run_on_cpu(params);
  // Every second row: the first layer's lie on the device, the others' are packed for it.
  std::vector<std::unique_ptr<Placed>> placed;
  std::vector<FurtherLayer> further(2);
  for (size_t i = 0; i < 3; ++i) {
    std::vector<std::byte> spread(2 * layers.k[i].size(), std::byte{0xFF});
    for (size_t row = 0; row < kRows; ++row)
      std::copy_n(layers.k[i].begin() + static_cast<int64_t>(row * 256), 256,
                  spread.begin() + static_cast<int64_t>(row * 512));
    placed.push_back(
        std::make_unique<Placed>(spread, i == 0 ? Where::kDevice : Where::kPageable, *calls));
    std::byte* k = placed.back()->data();
    placed.push_back(std::make_unique<Placed>(layers.v[i], Where::kPageable, *calls));
    std::byte* v = placed.back()->data();
    const LayerView& layer = layers.devices[i]->layer;
    if (i > 0) {
      further[i - 1] = {layer.base, k, v, nullptr, layer.k_scale, layer.v_scale};
      continue;
    }
    params.layer = layer;
    params.k = {k, Dtype::kBf16, {kRows, 2, 64}, {256, 64, 1}};
    params.v = dense_tensor(v, Dtype::kBf16, kRows, 2, 32);
  }
  params.further_layers = further.data();
  params.num_further_layers = 2;
  CHECK_OK(calls->append(params));
  CHECK_OK(calls->wait());
  layers.check();
}

TEST_CASE("a refused append of several layers writes none of them") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  std::mt19937_64 engine = random_engine(213);
  ThreeLayers layers(engine);
  const std::vector<int64_t> slots = {0};
  const DeviceBytes on_device(slots);
  const auto refused = [&](std::string_view part, const AppendParams& params) {
    const Status status = calls->append(params);
    CAPTURE(part);
    CAPTURE(status.to_string());
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(status.message().find(part) != std::string::npos);
    CHECK_OK(calls->wait());
    layers.check();
  };
  FurtherLayer further = {nullptr, layers.k[1].data(), layers.v[1].data(), nullptr, 1.0f, 1.0f};
  AppendParams good;
  good.layer = layers.devices[0]->layer;
  good.k = dense_tensor(layers.k[0].data(), Dtype::kBf16, kRows, 2, 64);
  good.v = dense_tensor(layers.v[0].data(), Dtype::kBf16, kRows, 2, 32);
  good.slots = slots.data();
  good.num_slots = 1;
  AppendParams params = good;
  params.further_layers = &further;
  params.num_further_layers = 1;
  refused("further_layers[0].base is null with 4 blocks", params);
  params = good;
  params.slots = nullptr;
  params.slots32 = on_device.data<int32_t>();
  refused("slots32 lies in device memory", params);
  params = good;
  params.rope.dim = 64;
  params.rope.positions = on_device.data<int64_t>();
  refused("rope.positions lies in device memory", params);
  const DeviceBytes cache(layers.cache);
  params.rope.positions = slots.data();
  set_tables(params.rope, layers.cache.data());
  params.rope.cos = cache.data();
  refused("rope.cos lies in device memory", params);
}

TEST_CASE("gather from first tokens on gives the CPU's values, in memory of each kind") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  for (const Where where : kEverywhere)
    for (const int64_t rows_per_sequence : {0, 25}) {
      CAPTURE(name(where));
      CAPTURE(rows_per_sequence);
      std::mt19937_64 engine = random_engine(214);
      Pool pool(kGeometry, 6, std::byte{0xFF}, 3);
      fill(pool, engine);
      DevicePool device(pool);
      const std::vector<float> before = normal_values(engine, 60 * 300);
      const std::vector<int32_t> table = {-1, 0, 5, 99, 3, 99, -1};
      const std::vector<int32_t> seq_lens = {40, 3}, first_tokens = {18, 1};
      GatherParams params;
      params.k_out = {nullptr, Dtype::kFp32, {60, 2, 64}, {300, 70, 1}};
      params.v_out = {nullptr, Dtype::kFp32, {60, 2, 32}, {300, 40, 1}};
      params.block_table = table.data();
      params.block_table_stride = 4;
      params.seq_lens = seq_lens.data();
      params.first_tokens = first_tokens.data();
      params.num_seqs = 2;
      params.rows_per_sequence = rows_per_sequence;
      std::vector<float> expected = before;
      params.layer = pool.layer();
      params.k_out.data = expected.data();
      params.v_out.data = expected.data() + 150;
      CHECK_OK(run_gather(params));
      Placed out(before, where, *calls);
      params.layer = device.layer;
      params.k_out.data = out.data();
      params.v_out.data = out.data<float>() + 150;
      CHECK_OK(calls->gather(params));
      check_same("gathered", out.read<float>(), expected);
    }
}

}  // namespace
}  // namespace larder::test
