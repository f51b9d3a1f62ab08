// append on the GPU: the bytes of the whole pool equal those after the CPU's append.
#include <limits>
#include <set>

#include "tests/kernels/cuda/device_calls.h"

namespace larder::kernels {
namespace {

using test::AnyTensor;
using test::DeviceBytes;
using test::draw;
using test::pick;
using test::TwinLayer;

constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

struct AppendCase {
  AttentionGeometry geometry;
  Encoder encoder = Encoder::kReference;
  KeyTransform transform = KeyTransform::kNone;
  Dtype k_dtype = Dtype::kBf16;
  Dtype v_dtype = Dtype::kBf16;
  int64_t rows = 9;
  int64_t num_blocks = 3;
  bool wrong = false;  // slots past the pool, blocks without the right
  bool dense = false;
};

// Distinct slots, a few skipped rows.
std::vector<int64_t> any_slots(int64_t rows, int64_t pool_slots, std::mt19937_64& engine) {
  std::vector<int64_t> slots;
  std::set<int64_t> taken;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = draw(engine, 0, pool_slots - 1);
    const bool skip = draw(engine, 0, 7) == 0 || !taken.insert(slot).second;
    slots.push_back(skip ? pick<int64_t>(engine, {-1, -7, -kInt64Max - 1}) : slot);
  }
  return slots;
}

void run_case(const AppendCase& c, std::mt19937_64& engine) {
  TwinLayer layer(c.geometry, c.num_blocks, engine);
  layer.host().encoder = c.encoder;
  layer.host().k_scale = test::any_scale(engine);
  layer.host().v_scale = test::any_scale(engine);
  layer.set_transform(c.transform, engine);
  const bool is_mla = c.geometry.mla_row != MlaRow::kNone;
  AnyTensor k(c.k_dtype, c.rows, c.geometry.num_kv_heads, is_mla ? 512 : c.geometry.k_dim, c.dense,
              engine);
  AnyTensor v(c.v_dtype, c.rows, c.geometry.num_kv_heads, is_mla ? 64 : c.geometry.v_dim, c.dense,
              engine);
  k.fill(engine);
  v.fill(engine);
  const int64_t block_tokens = c.geometry.block_tokens;
  const int64_t pool_slots = c.num_blocks * block_tokens;
  test::PointOfUse use(c.num_blocks, c.wrong, engine);
  std::vector<int64_t> slots = any_slots(c.rows, pool_slots, engine);
  std::vector<int64_t> good = slots;
  std::vector<int64_t> wrong;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (c.wrong && draw(engine, 0, 4) == 0)
      slots[i] = pick<int64_t>(engine, {pool_slots, pool_slots + 1, kInt64Max, int64_t{1} << 33});
    good[i] = slots[i];
    if (slots[i] < 0 || use.may(slots[i] / block_tokens, true)) continue;
    good[i] = -1;
    wrong.push_back(slots[i]);
  }
  CAPTURE(test::text_of(layer.host()));
  CAPTURE(name(c.k_dtype));
  CAPTURE(name(c.v_dtype));
  CAPTURE(c.rows);

  const DeviceBytes device_k(k.bytes);
  const DeviceBytes device_v(v.bytes);
  const DeviceBytes device_slots(slots);
  AppendParams params;
  params.layer = layer.device();
  params.k = k.view(device_k.data());
  params.v = v.view(device_v.data());
  params.slots = device_slots.data<int64_t>();
  params.num_slots = c.rows;
  test::check_ok(run_append(params, use.target()));
  params.layer = layer.host();
  params.k = k.host();
  params.v = v.host();
  params.slots = good.data();
  test::check_ok(run_append(params));
  const std::string text = test::differences(layer.read(), layer.pool.bytes());
  CHECK_MESSAGE(text.empty(), text);
  use.check(wrong);
}

constexpr std::initializer_list<Dtype> kInputs = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};

TEST_CASE("every pair of formats, encoder, transform and input has the CPU's bytes") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7001);
  for (int k = 0; k < 5; ++k)
    for (int v = 0; v < 5; ++v)
      for (int transform = 0; transform < 4; ++transform)
        for (int encoder = 0; encoder < 3; ++encoder) {
          AppendCase c;
          c.transform = static_cast<KeyTransform>(transform);
          c.encoder = static_cast<Encoder>(encoder);
          const auto k_format = static_cast<KvFormat>(k);
          const auto v_format = static_cast<KvFormat>(v);
          if (encoder > 0 && k_format != KvFormat::kNvfp4 && v_format != KvFormat::kNvfp4) continue;
          for (const Dtype dtype : kInputs) {
            c.geometry = test::any_geometry(k_format, v_format, is_rotated(c.transform), engine);
            c.k_dtype = dtype;
            c.v_dtype = draw(engine, 0, 2) == 0 ? pick(engine, kInputs) : dtype;
            c.dense = draw(engine, 0, 1) == 0;
            c.wrong = draw(engine, 0, 2) == 0;
            run_case(c, engine);
          }
        }
}

TEST_CASE("groups of every kind have the CPU's nvfp4 bytes by every encoder") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7002);
  for (int encoder = 0; encoder < 3; ++encoder)
    for (const Dtype dtype : kInputs)
      for (int repeat = 0; repeat < 10; ++repeat) {
        AppendCase c;
        c.geometry = {1, 4, 64, 128, 128, KvFormat::kNvfp4, KvFormat::kNvfp4};
        c.encoder = static_cast<Encoder>(encoder);
        c.k_dtype = c.v_dtype = dtype;
        c.rows = 300;
        c.num_blocks = 8;
        run_case(c, engine);
      }
}

// Found by a search: another order of best_scale's tries or of four_over_six's fused operations
// gives other bytes.
TEST_CASE("groups whose scale hangs on the order of operations have the CPU's bytes") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7008);
  struct Group {
    Encoder encoder;
    float global_scale;
    std::vector<float> values;
  };
  const Group groups[] = {
      {Encoder::kFourOverSix, 0.02f, {0x1.326p+1f, 0.25f, 0, -0x1.1p+1f, 0, 0, 0, 0}},
      {Encoder::kFourOverSix, 0.02f, {0, 0, 0x1.aa3d7p+2f, 0x1.633334p+3f, 0, 0, 0, 0}},
      {Encoder::kBestScale,
       0.37f,
       {-0x1.7ae148p-1f, 0x1.1c28f6p+0f, 0x1.1c28f6p+0f, -0x1.7ae148p-1f, 0, 0, 0x1.7ae148p+0f,
        0x1.d9999ap+0f, -0x1.1c28f6p+0f, 0x1.1c28f6p+0f, 0x1.7ae148p-2f, 0x1.d9999ap+0f,
        -0x1.7ae148p-1f, 0, 0x1.d9999ap+0f, -0x1.7ae148p-2f}},
      {Encoder::kBestScale,
       1.0f,
       {0, -0x1.38p+2f, -1.75f, 0x1.7p+1f, 0, 0, 0, 0.75f, 0, 0, 0, 0, 2.5f, 0, 0x1.7p+1f, 0}}};
  for (Group group : groups) {
    group.values.resize(16);
    TwinLayer layer({1, 1, 1, 16, 16, KvFormat::kNvfp4, KvFormat::kNvfp4}, 1, engine);
    layer.host().encoder = group.encoder;
    layer.host().k_scale = layer.host().v_scale = group.global_scale;
    CAPTURE(test::text_of(layer.host()));
    const std::vector<int64_t> slots = {0};
    const DeviceBytes values(group.values), device_slots(slots);
    test::PointOfUse use(1, false, engine);
    const TensorView on_device = dense_tensor(values.data(), Dtype::kFp32, 1, 1, 16);
    const TensorView on_host = dense_tensor(group.values.data(), Dtype::kFp32, 1, 1, 16);
    test::check_ok(run_append(
        {layer.device(), on_device, on_device, device_slots.data<int64_t>(), 1}, use.target()));
    test::check_ok(run_append({layer.host(), on_host, on_host, slots.data(), 1}));
    const std::string text = test::differences(layer.read(), layer.pool.bytes());
    CHECK_MESSAGE(text.empty(), text);
  }
}

TEST_CASE("every MLA row format and input has the CPU's bytes") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7003);
  for (int row = 1; row <= 4; ++row)
    for (const Dtype latent : kInputs)
      for (const Dtype rope : kInputs)
        for (const int32_t block_tokens : {1, 3, 16, 64, 1024}) {
          AppendCase c;
          c.geometry = mla_geometry(1, block_tokens, static_cast<MlaRow>(row));
          c.k_dtype = latent;
          c.v_dtype = rope;
          c.rows = 40;
          c.num_blocks = block_tokens < 16 ? 30 : 3;
          c.wrong = draw(engine, 0, 1) == 0;
          c.dense = draw(engine, 0, 1) == 0;
          run_case(c, engine);
        }
}

TEST_CASE("no rows, one row, and more rows than a grid has CTAs") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7004);
  for (const int64_t rows : {0, 1, 70001, 1'100'000}) {
    AppendCase c;
    c.geometry = {1, 1, 16, 16, 16, KvFormat::kNvfp4, KvFormat::kFp8E4m3};
    c.rows = rows;
    c.num_blocks = rows / 16 + 2;
    c.dense = true;
    run_case(c, engine);
  }
}

TEST_CASE("rows after the slots are not looked at, and a pool without blocks takes none") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7005);
  TwinLayer layer({1, 2, 4, 32, 32, KvFormat::kBf16, KvFormat::kBf16}, 0, engine);
  AnyTensor k(Dtype::kBf16, 3, 2, 32, true, engine);
  const DeviceBytes device_k(k.bytes);
  const std::vector<int64_t> slots = {0, -1, kInt64Max};
  const DeviceBytes device_slots(slots);
  test::PointOfUse use(0, true, engine);
  AppendParams params;
  params.layer = layer.device();
  params.k = params.v = k.view(device_k.data());
  params.slots = device_slots.data<int64_t>();
  params.num_slots = 2;
  test::check_ok(run_append(params, use.target()));
  use.check({0});
}

TEST_CASE("faults and rights may be left out") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7006);
  TwinLayer layer({1, 1, 4, 16, 16, KvFormat::kBf16, KvFormat::kBf16}, 2, engine);
  AnyTensor k(Dtype::kBf16, 2, 1, 16, true, engine);
  k.fill(engine);
  const DeviceBytes device_k(k.bytes);
  const std::vector<int64_t> slots = {8, 7};
  const DeviceBytes device_slots(slots);
  AppendParams params;
  params.layer = layer.device();
  params.k = params.v = k.view(device_k.data());
  params.slots = device_slots.data<int64_t>();
  params.num_slots = 2;
  Target target;
  target.backend = Backend::kCuda;
  test::check_ok(run_append(params, target));
  const std::vector<int64_t> good = {-1, 7};
  params.layer = layer.host();
  params.k = params.v = k.host();
  params.slots = good.data();
  test::check_ok(run_append(params));
  const std::string text = test::differences(layer.read(), layer.pool.bytes());
  CHECK_MESSAGE(text.empty(), text);
}

TEST_CASE("slots that are not aligned are refused, as a GPU cannot read them") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7007);
  TwinLayer layer({1, 1, 4, 16, 16, KvFormat::kBf16, KvFormat::kBf16}, 1, engine);
  AnyTensor k(Dtype::kBf16, 1, 1, 16, true, engine);
  const DeviceBytes memory(256);
  AppendParams params;
  params.layer = layer.device();
  params.k = params.v = k.view(memory.data());
  params.slots = reinterpret_cast<const int64_t*>(memory.data() + 4);
  params.num_slots = 1;
  test::PointOfUse use(1, false, engine);
  const Status status = run_append(params, use.target());
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message() == "slots is not aligned to 8 bytes");
}

}  // namespace
}  // namespace larder::kernels
