// gather on the GPU: what every CUDA row that takes the call writes equals, bit for bit, what the
// CPU gathers from single slots; which slot belongs to which row is worked out here.
#include <cmath>
#include <limits>

#include "tests/kernels/cuda/every_row.h"

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
  std::vector<int32_t> firsts;  // or none
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

// Sequences of a few blocks, or their last tokens; the part of a table row that no token needs
// holds anything.
void draw_sequences(Wanted& wanted, int64_t num_seqs, int64_t num_blocks, int64_t block_tokens,
                    bool wild, std::mt19937_64& engine) {
  wanted.table_stride = draw(engine, 0, 5);
  const int64_t held = wanted.table_stride * block_tokens;
  if (draw(engine, 0, 1) == 0) wanted.window = std::max<int64_t>(1, held + draw(engine, -2, 3));
  const int64_t most = wanted.window > 0 ? std::min(held, wanted.window) : held;
  const bool has_firsts = draw(engine, 0, 1) == 0;
  for (int64_t s = 0; s < num_seqs; ++s) {
    int64_t len = draw(engine, 0, has_firsts ? held : std::min<int64_t>(most, 60));
    int64_t first = has_firsts ? len - draw(engine, 0, std::min<int64_t>({len, most, 60})) : 0;
    if (wild && draw(engine, 0, 3) == 0)
      len = pick<int64_t>(engine, {-1, -kInt32Max - 1, kInt32Max, held + 1, most + 1});
    if (wild && has_firsts && draw(engine, 0, 3) == 0)
      first = pick<int64_t>(engine, {-1, -kInt32Max - 1, kInt32Max, held + 1, len + 1});
    wanted.lens.push_back(static_cast<int32_t>(len));
    if (has_firsts) wanted.firsts.push_back(static_cast<int32_t>(first));
    for (int64_t i = 0; i < wanted.table_stride; ++i) {
      const bool used = i * block_tokens < len && (i + 1) * block_tokens > first;
      const bool any = used ? wild && draw(engine, 0, 4) == 0 : true;
      wanted.table.push_back(static_cast<int32_t>(
          any ? pick<int64_t>(engine, {-1, num_blocks, kInt32Max, -kInt32Max - 1})
              : draw(engine, 0, num_blocks - 1)));
    }
  }
}

// A sequence's tokens as far as its table row holds them: [first, len).
struct Held {
  int64_t first;
  int64_t len;
};
Held held_of(const Wanted& wanted, size_t sequence, int64_t block_tokens) {
  const int64_t len =
      std::clamp<int64_t>(wanted.lens[sequence], 0, wanted.table_stride * block_tokens);
  return {wanted.firsts.empty() ? 0 : std::clamp<int64_t>(wanted.firsts[sequence], 0, len), len};
}

// Rows of the outputs, of which a wild call has too few.
int64_t rows_of(const Wanted& wanted, int64_t block_tokens, bool wild, std::mt19937_64& engine) {
  int64_t rows = 0;
  for (size_t s = 0; s < wanted.lens.size(); ++s) {
    const Held held = held_of(wanted, s, block_tokens);
    rows = wanted.window > 0 ? static_cast<int64_t>(s + 1) * wanted.window
                             : rows + held.len - held.first;
  }
  return std::max<int64_t>(
      1, wild && rows > 0 && draw(engine, 0, 1) == 0 ? draw(engine, 1, rows) : rows + 2);
}

void want_sequences(Wanted& wanted, int64_t rows, int64_t block_tokens,
                    const test::PointOfUse& use) {
  wanted.slot_of_row.assign(static_cast<size_t>(rows), -1);
  int64_t first_row = 0;
  for (size_t s = 0; s < wanted.lens.size(); ++s) {
    if (wanted.window > 0) first_row = static_cast<int64_t>(s) * wanted.window;
    const auto [first, len] = held_of(wanted, s, block_tokens);
    int64_t count = len - first;
    if (wanted.window > 0) count = std::min(count, wanted.window);
    const int64_t next_row = first_row + count;
    count = std::clamp<int64_t>(rows - first_row, 0, count);
    if (first + count != wanted.lens[s])
      wanted.wrong.push_back(wanted.lens[s]);
    else if (!wanted.firsts.empty() && first != wanted.firsts[s])
      wanted.wrong.push_back(wanted.firsts[s]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = first + i;
      const int64_t block = wanted.table[static_cast<size_t>(
          static_cast<int64_t>(s) * wanted.table_stride + token / block_tokens)];
      const bool may = use.may(block, false);
      if (may)
        wanted.slot_of_row[static_cast<size_t>(first_row + i)] =
            block * block_tokens + token % block_tokens;
      else if (i == 0 || token % block_tokens == 0)
        wanted.wrong.push_back(block);
    }
    first_row = next_row;
  }
}

// Any bytes, or those of ordinary numbers in every format, but no NaN as a tile scale: which of two
// NaNs a product keeps is nobody's promise.
void fill_pool(TwinLayer& layer, std::mt19937_64& engine) {
  const bool ordinary = draw(engine, 0, 1) == 0;
  for (std::byte& byte : layer.pool.bytes()) {
    byte = static_cast<std::byte>(engine());
    if (ordinary && (byte & std::byte{0x78}) == std::byte{0x78}) byte &= std::byte{0xB7};
  }
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
  bool aligned = false;  // as cuda_gather_rows takes it
};

// The CPU's output, and a GPU's of the same form.
struct Output {
  AnyTensor tensor;
  DeviceBytes device;
  Output(const GatherCase& c, int64_t rows, int64_t dim, std::mt19937_64& engine)
      : tensor(c.dtype, rows, c.geometry.num_kv_heads, dim, draw(engine, 0, 1) == 0, engine,
               c.aligned ? 8 : 1),
        device(tensor.bytes) {}
  void poison() const { REQUIRE(cudaMemset(device.data(), 0xFF, device.size()) == cudaSuccess); }
  void check(std::string_view side) const {
    const std::string text = test::differences(device.read(), tensor.bytes);
    CHECK_MESSAGE(text.empty(), side << ": " << text);
  }
};

// Tables in device memory.
struct DeviceTables {
  DeviceBytes slots, table, lens, firsts;
  explicit DeviceTables(const Wanted& wanted)
      : slots(wanted.slots), table(wanted.table), lens(wanted.lens), firsts(wanted.firsts) {}
  void set(const Wanted& wanted, GatherParams& params) const {
    params.block_table = table.data<int32_t>();
    params.seq_lens = lens.data<int32_t>();
    params.first_tokens = wanted.firsts.empty() ? nullptr : firsts.data<int32_t>();
    params.num_seqs = static_cast<int64_t>(wanted.lens.size());
    params.block_table_stride = wanted.table_stride;
    params.rows_per_sequence = wanted.window;
    params.slots = slots.data<int64_t>();
    params.num_slots = static_cast<int64_t>(wanted.slots.size());
  }
};

// Runs every CUDA row that takes the call; the names of those.
std::vector<std::string_view> run_case(const GatherCase& c, std::mt19937_64& engine) {
  const AttentionGeometry& g = c.geometry;
  TwinLayer layer(g, c.num_blocks, engine, c.aligned);
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
  CAPTURE(wanted.firsts.size());
  const bool is_mla = g.mla_row != MlaRow::kNone;
  Output k(c, rows, g.k_dim, engine);
  Output v(c, rows, g.v_dim, engine);
  // Either output may be left out.
  const int64_t left_out = is_mla ? 2 : draw(engine, 0, 5);
  const DeviceTables tables(wanted);
  GatherParams params;
  params.layer = layer.device();
  if (left_out != 1) params.k_out = k.tensor.view(k.device.data());
  if (left_out != 2) params.v_out = v.tensor.view(v.device.data());
  tables.set(wanted, params);

  GatherParams expected;
  expected.layer = layer.host();
  if (left_out != 1) expected.k_out = k.tensor.host();
  if (left_out != 2) expected.v_out = v.tensor.host();
  expected.slots = wanted.slot_of_row.data();
  expected.num_slots = static_cast<int64_t>(wanted.slot_of_row.size());
  test::check_ok(run_gather(expected));

  test::check_ok(validate_gather(params, Tables::kDevice));
  auto names = test::on_every_row<GatherParams>(
      gather_kernels(), use.target(),
      [&] {
        (void)use.target();  // clears the faults
        k.poison();
        v.poison();
        return params;
      },
      [&] {
        k.check("k_out");
        v.check("v_out");
        use.check(wanted.wrong);
      });
  const std::string text = test::differences(layer.read(), layer.pool.bytes());
  CHECK_MESSAGE(text.empty(), "pool: " << text);
  return names;
}

// A case that the row for common shapes takes.
void run_aligned(GatherCase c, std::mt19937_64& engine) {
  c.aligned = true;
  const auto names = run_case(c, engine);
  CAPTURE(name(c.geometry.v_format));
  CAPTURE(c.geometry.k_dim);
  CAPTURE(c.geometry.v_dim);
  CHECK(test::has_name(names, "cuda_gather_rows"));
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

TEST_CASE("aligned outputs of every pair of formats, power of two and transform are the CPU's") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7105);
  for (int k = 0; k < 5; ++k)
    for (int v = 0; v < 5; ++v)
      for (int transform = 0; transform < 4; ++transform)
        for (const int32_t k_dim : {16, 32, 64, 128, 256, 512}) {
          GatherCase c;
          c.transform = static_cast<KeyTransform>(transform);
          if (is_rotated(c.transform) && k_dim > 256) continue;
          c.geometry = {1,
                        static_cast<int32_t>(draw(engine, 1, 9)),
                        pick(engine, {3, 16, 16, 64}),
                        k_dim,
                        pick(engine, {16, 32, 64, 128, 256, 512}),
                        static_cast<KvFormat>(k),
                        static_cast<KvFormat>(v)};
          // Small blocks of few heads may leave V's region between two multiples of 16.
          if (c.geometry.block_tokens == 3) c.geometry.num_kv_heads = 16;
          c.dtype = pick(engine, {Dtype::kBf16, Dtype::kFp16});
          c.by_slots = draw(engine, 0, 2) == 0;
          c.wild = draw(engine, 0, 2) == 0;
          run_aligned(c, engine);
        }
}

TEST_CASE("aligned outputs of every MLA row format are the CPU's, FP8 staging too") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7106);
  for (int row = 1; row <= 4; ++row)
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp8E4m3})
      for (const int32_t block_tokens : {1, 3, 16, 64})
        for (int repeat = 0; repeat < 6; ++repeat) {
          GatherCase c;
          c.geometry = mla_geometry(1, block_tokens, static_cast<MlaRow>(row));
          c.dtype = dtype;
          c.by_slots = repeat % 3 == 0;
          c.wild = draw(engine, 0, 1) == 0;
          run_aligned(c, engine);
        }
}

TEST_CASE("aligned outputs of one token and of so many that CTAs take all heads are the CPU's") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7107);
  for (const int64_t count : {1, 15, 17, 5000, 70001})
    for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kBf16}) {
      GatherCase c;
      c.geometry = {1, 5, 16, 64, 32, format, format};
      c.transform = count == 5000 ? KeyTransform::kCentredRotated : KeyTransform::kNone;
      c.by_slots = true;
      c.count = count;
      c.num_blocks = 50;
      run_aligned(c, engine);
    }
}

TEST_CASE("sequences without gaps are found among thousands, and too many are the portable row's") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7108);
  for (const int64_t count : {2, 255, 256, 257, 1000, 4096, 4097}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      GatherCase c;
      c.geometry = {1, 2, 4, 16, 32, KvFormat::kNvfp4, KvFormat::kFp8E4m3};
      c.count = count;
      c.num_blocks = 20;
      c.wild = repeat % 2 == 0;
      c.aligned = true;
      run_case(c, engine);
    }
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
