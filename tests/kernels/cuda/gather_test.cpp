// gather on the GPU: outputs equal, bit for bit, what the CPU gathers from single slots; which slot
// belongs to which row is worked out here.
#include <cmath>
#include <limits>

#include "tests/kernels/cuda/device_calls.h"

namespace larder::kernels {
namespace {

using test::AnyTensor;
using test::DeviceBytes;
using test::draw;
using test::pick;
using test::TwinLayer;

constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

// What a gather asks for, and what should come of it.
struct Wanted {
  std::vector<int64_t> slots;  // the slot form; else the table
  std::vector<int32_t> table;
  std::vector<int32_t> lens;
  int64_t table_stride = 0;
  int64_t window = 0;
  std::vector<int64_t> slot_of_row;  // -1: the row keeps its bytes
  std::vector<int64_t> wrong;
};

void want_slots(Wanted& wanted, int64_t rows, int64_t pool_slots, int64_t block_tokens,
                const test::PointOfUse& use, bool wild, std::mt19937_64& engine) {
  for (int64_t i = 0; i < rows; ++i) {
    int64_t slot = draw(engine, 0, 9) == 0 ? -draw(engine, 1, 5) : draw(engine, 0, pool_slots - 1);
    if (wild && draw(engine, 0, 4) == 0)
      slot = pick<int64_t>(engine, {pool_slots, pool_slots + 5, kInt64Max, int64_t{1} << 32});
    wanted.slots.push_back(slot);
    const bool is_wrong = slot >= 0 && !use.may(slot / block_tokens, false);
    if (is_wrong) wanted.wrong.push_back(slot);
    wanted.slot_of_row.push_back(is_wrong || slot < 0 ? -1 : slot);
  }
}

// Sequences of a few blocks; the part of a table row that no token needs holds anything.
void draw_sequences(Wanted& wanted, int64_t num_seqs, int64_t num_blocks, int64_t block_tokens,
                    bool wild, std::mt19937_64& engine) {
  wanted.table_stride = draw(engine, 0, 5);
  const int64_t held = wanted.table_stride * block_tokens;
  if (draw(engine, 0, 1) == 0) wanted.window = std::max<int64_t>(1, held + draw(engine, -2, 3));
  const int64_t most = wanted.window > 0 ? std::min(held, wanted.window) : held;
  for (int64_t s = 0; s < num_seqs; ++s) {
    int64_t len = draw(engine, 0, std::min<int64_t>(most, 60));
    if (wild && draw(engine, 0, 3) == 0)
      len = pick<int64_t>(engine, {-1, -kInt32Max - 1, kInt32Max, held + 1, most + 1});
    wanted.lens.push_back(static_cast<int32_t>(len));
    for (int64_t i = 0; i < wanted.table_stride; ++i) {
      const bool used = i * block_tokens < len;
      const bool any = used ? wild && draw(engine, 0, 4) == 0 : true;
      wanted.table.push_back(static_cast<int32_t>(
          any ? pick<int64_t>(engine, {-1, num_blocks, kInt32Max, -kInt32Max - 1})
              : draw(engine, 0, num_blocks - 1)));
    }
  }
}

// Rows of the outputs, of which a wild call has too few.
int64_t rows_of(const Wanted& wanted, int64_t block_tokens, bool wild, std::mt19937_64& engine) {
  const int64_t held = wanted.table_stride * block_tokens;
  int64_t rows = 0;
  for (size_t s = 0; s < wanted.lens.size(); ++s) {
    const int64_t len = std::clamp<int64_t>(wanted.lens[s], 0, held);
    rows = wanted.window > 0 ? static_cast<int64_t>(s + 1) * wanted.window : rows + len;
  }
  return std::max<int64_t>(
      1, wild && rows > 0 && draw(engine, 0, 1) == 0 ? draw(engine, 1, rows) : rows + 2);
}

void want_sequences(Wanted& wanted, int64_t rows, int64_t block_tokens,
                    const test::PointOfUse& use) {
  wanted.slot_of_row.assign(static_cast<size_t>(rows), -1);
  const int64_t held = wanted.table_stride * block_tokens;
  int64_t first = 0;
  for (size_t s = 0; s < wanted.lens.size(); ++s) {
    if (wanted.window > 0) first = static_cast<int64_t>(s) * wanted.window;
    int64_t len = std::clamp<int64_t>(wanted.lens[s], 0, held);
    if (wanted.window > 0) len = std::min(len, wanted.window);
    const int64_t next = first + len;
    len = std::clamp<int64_t>(rows - first, 0, len);
    if (len != wanted.lens[s]) wanted.wrong.push_back(wanted.lens[s]);
    for (int64_t i = 0; i < len; ++i) {
      const int64_t block = wanted.table[static_cast<size_t>(
          static_cast<int64_t>(s) * wanted.table_stride + i / block_tokens)];
      const bool may = use.may(block, false);
      if (may)
        wanted.slot_of_row[static_cast<size_t>(first + i)] =
            block * block_tokens + i % block_tokens;
      else if (i % block_tokens == 0)
        wanted.wrong.push_back(block);
    }
    first = next;
  }
}

// Any bytes, but no NaN as a tile scale: which of two NaNs a product keeps is nobody's promise.
void fill_pool(TwinLayer& layer, std::mt19937_64& engine) {
  for (std::byte& byte : layer.pool.bytes()) byte = static_cast<std::byte>(engine());
  const AttentionGeometry& g = layer.pool.geometry();
  if (g.mla_row != MlaRow::kFp8Ds) return;
  for (int64_t slot = 0; slot < layer.host().num_blocks * g.block_tokens; ++slot)
    for (int tile = 0; tile < 4; ++tile) {
      const float scale = pick(engine, {0.01f, 3.0f, 1e38f, 1e-39f, INFINITY, 0.0f, -1.5f});
      std::memcpy(layer.pool.bytes().data() + layer.pool.mla_offset(slot) + 512 + 4 * tile, &scale,
                  sizeof scale);
    }
}

struct GatherCase {
  AttentionGeometry geometry;
  KeyTransform transform = KeyTransform::kNone;
  Dtype dtype = Dtype::kBf16;
  bool by_slots = false;
  bool wild = false;  // wrong slots, entries, lengths, rights; outputs too small
  int64_t count = 7;  // of slots or sequences
  int64_t num_blocks = 4;
};

// Outputs on the device before and after, beside the CPU's.
struct Output {
  AnyTensor tensor;
  DeviceBytes device;
  Output(Dtype dtype, int64_t rows, int64_t heads, int64_t dim, std::mt19937_64& engine)
      : tensor(dtype, rows, heads, dim, draw(engine, 0, 1) == 0, engine), device(tensor.bytes) {}
  void check(std::string_view side) const {
    const std::string text = test::differences(device.read(), tensor.bytes);
    CHECK_MESSAGE(text.empty(), side << ": " << text);
  }
};

void run_case(const GatherCase& c, std::mt19937_64& engine) {
  const AttentionGeometry& g = c.geometry;
  TwinLayer layer(g, c.num_blocks, engine);
  layer.host().k_scale = test::any_scale(engine);
  layer.host().v_scale = test::any_scale(engine);
  layer.set_transform(c.transform, engine);
  fill_pool(layer, engine);
  test::PointOfUse use(c.num_blocks, c.wild, engine);
  Wanted wanted;
  int64_t rows = c.count;
  if (c.by_slots) {
    want_slots(wanted, rows, c.num_blocks * g.block_tokens, g.block_tokens, use, c.wild, engine);
  } else {
    draw_sequences(wanted, c.count, c.num_blocks, g.block_tokens, c.wild, engine);
    rows = rows_of(wanted, g.block_tokens, c.wild, engine);
    want_sequences(wanted, rows, g.block_tokens, use);
  }
  CAPTURE(test::text_of(layer.host()));
  CAPTURE(name(c.dtype));
  CAPTURE(c.by_slots);
  CAPTURE(rows);
  CAPTURE(wanted.window);
  CAPTURE(wanted.table_stride);
  const bool is_mla = g.mla_row != MlaRow::kNone;
  Output k(c.dtype, rows, g.num_kv_heads, g.k_dim, engine);
  Output v(c.dtype, rows, g.num_kv_heads, g.v_dim, engine);
  // Either output may be left out.
  const int64_t left_out = is_mla ? 2 : draw(engine, 0, 5);
  const DeviceBytes slots(wanted.slots);
  const DeviceBytes table(wanted.table);
  const DeviceBytes lens(wanted.lens);
  GatherParams params;
  params.layer = layer.device();
  if (left_out != 1) params.k_out = k.tensor.view(k.device.data());
  if (left_out != 2) params.v_out = v.tensor.view(v.device.data());
  params.block_table = table.data<int32_t>();
  params.seq_lens = lens.data<int32_t>();
  params.num_seqs = static_cast<int64_t>(wanted.lens.size());
  params.block_table_stride = wanted.table_stride;
  params.rows_per_sequence = wanted.window;
  params.slots = slots.data<int64_t>();
  params.num_slots = static_cast<int64_t>(wanted.slots.size());
  test::check_ok(run_gather(params, use.target()));

  GatherParams expected;
  expected.layer = layer.host();
  if (left_out != 1) expected.k_out = k.tensor.host();
  if (left_out != 2) expected.v_out = v.tensor.host();
  expected.slots = wanted.slot_of_row.data();
  expected.num_slots = static_cast<int64_t>(wanted.slot_of_row.size());
  test::check_ok(run_gather(expected));
  k.check("k_out");
  v.check("v_out");
  use.check(wanted.wrong);
  const std::string text = test::differences(layer.read(), layer.pool.bytes());
  CHECK_MESSAGE(text.empty(), "pool: " << text);
}

TEST_CASE("every pair of formats, transform and output dtype is gathered as on the CPU") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7101);
  for (int k = 0; k < 5; ++k)
    for (int v = 0; v < 5; ++v)
      for (int transform = 0; transform < 4; ++transform)
        for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32})
          for (const bool by_slots : {true, false}) {
            GatherCase c;
            c.transform = static_cast<KeyTransform>(transform);
            c.geometry = test::any_geometry(static_cast<KvFormat>(k), static_cast<KvFormat>(v),
                                            is_rotated(c.transform), engine);
            c.dtype = dtype;
            c.by_slots = by_slots;
            c.wild = draw(engine, 0, 2) == 0;
            run_case(c, engine);
          }
}

TEST_CASE("every MLA row format is gathered as on the CPU, into FP8 staging too") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7102);
  for (int row = 1; row <= 4; ++row)
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32, Dtype::kFp8E4m3})
      for (const int32_t block_tokens : {1, 3, 16, 64})
        for (const bool by_slots : {true, false}) {
          GatherCase c;
          c.geometry = mla_geometry(1, block_tokens, static_cast<MlaRow>(row));
          c.dtype = dtype;
          c.by_slots = by_slots;
          c.wild = draw(engine, 0, 1) == 0;
          run_case(c, engine);
        }
}

TEST_CASE("no rows, one row, and more slots or sequences than a grid's axes have are gathered") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7103);
  for (const int64_t count : {0, 1, 70001, 1'100'000})
    for (const bool by_slots : {true, false}) {
      if (count > 70001 && !by_slots) continue;
      GatherCase c;
      c.geometry = {1, 1, 2, 16, 16, KvFormat::kNvfp4, KvFormat::kFp8E5m2};
      c.by_slots = by_slots;
      c.count = count;
      c.num_blocks = 100;
      run_case(c, engine);
    }
}

TEST_CASE("wild tables of many short sequences are cut, counted and gathered as far as they go") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7104);
  for (int repeat = 0; repeat < 60; ++repeat) {
    GatherCase c;
    c.geometry = {1, 2, 0, 16, 32, KvFormat::kBf16, KvFormat::kFp8E4m3};
    c.geometry.block_tokens = pick(engine, {1, 2, 16, 17, 40});
    c.wild = true;
    c.count = draw(engine, 1, 300);
    c.num_blocks = 20;
    run_case(c, engine);
  }
}

}  // namespace
}  // namespace larder::kernels
