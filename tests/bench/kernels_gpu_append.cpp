// append on a GPU: every format, encoder and transform, and what it takes beside rows.
#include <array>
#include <cmath>

#include "tests/bench/gpu_pool.h"

namespace larder::test {
namespace {

using kernels::AppendParams;

enum class RopeCase { kNone, kTables, kTheta };

struct AppendCase {
  AttentionGeometry geometry;
  int64_t tokens;
  Encoder encoder = Encoder::kReference;
  KeyTransform transform = KeyTransform::kNone;
  Dtype input = Dtype::kBf16;
  bool slots32 = false;
  RopeCase rope = RopeCase::kNone;
};

constexpr int kRopeRows = 32768;

// cos and sin of kRopeRows positions, as engines keep them.
std::vector<float> rope_table(int dim, bool is_sin) {
  std::vector<float> table;
  for (int position = 0; position < kRopeRows; ++position)
    for (int i = 0; i < dim / 2; ++i) {
      const double angle = position * std::pow(10000.0, -2.0 * i / dim);
      table.push_back(static_cast<float>(is_sin ? std::sin(angle) : std::cos(angle)));
    }
  return table;
}

std::vector<float> key_offsets(const AttentionGeometry& geometry) {
  std::mt19937 engine(11);
  std::normal_distribution<float> normal;
  std::vector<float> offsets(static_cast<size_t>(geometry.num_kv_heads * geometry.k_dim));
  for (float& offset : offsets) offset = normal(engine);
  return offsets;
}

// All memory of an item. Layer l of buffer b has its rows at (l * buffers + b) * tokens.
class AppendItem {
 public:
  AppendItem(const AppendCase& a, int64_t buffers)
      : case_(a),
        buffers_(buffers),
        pool_(a.geometry, a.tokens, buffers),
        rows_{DeviceMemory(rows() * row_bytes(0)), DeviceMemory(rows() * row_bytes(1))},
        slots64_(a.slots32 ? std::vector<int64_t>() : pool_.slots<int64_t>(buffers)),
        slots32_(a.slots32 ? pool_.slots<int32_t>(buffers) : std::vector<int32_t>()),
        host_offset_(key_offsets(a.geometry)),
        offset_(host_offset_),
        further_(static_cast<size_t>(buffers * (a.geometry.num_layers - 1))) {
    const Fill fill = a.input == Dtype::kBf16 ? Fill::kBf16 : Fill::kFp16;
    for (size_t i = 0; i < 2; ++i)
      launch_fill(rows_[i].data(), rows_[i].bytes(), fill, 3 + i, nullptr);
    if (a.rope == RopeCase::kTables)
      for (size_t i = 0; i < 2; ++i) host_tables_[i] = rope_table(dim(0), i == 1);
    for (const auto& table : host_tables_) tables_.emplace_back(table);
    for (int64_t i = 0; i < a.tokens; ++i) host_positions_.push_back(i % kRopeRows);
    positions_.emplace(host_positions_);
    for (int64_t i = 0; i < std::ssize(further_); ++i) {
      const int64_t layers = a.geometry.num_layers - 1;
      further_[static_cast<size_t>(i)] = further_layer(pool_.layer(), i / layers, 1 + i % layers);
    }
    check(cudaDeviceSynchronize());
  }

  AppendParams params(int64_t buffer) const {
    AppendParams p;
    p.layer = layer(pool_.layer());
    p.layer.key_offset = is_centred(case_.transform) ? offset_.as<float>() : nullptr;
    p.k = tensor(0, row_data(0, 0, buffer), case_.tokens);
    p.v = tensor(1, row_data(1, 0, buffer), case_.tokens);
    if (case_.slots32)
      p.slots32 = slots32_.as<int32_t>() + buffer * case_.tokens;
    else
      p.slots = slots64_.as<int64_t>() + buffer * case_.tokens;
    p.num_slots = case_.tokens;
    p.rope = rope(positions_->as<int64_t>(), tables_[0].data(), tables_[1].data());
    p.num_further_layers = case_.geometry.num_layers - 1;
    if (p.num_further_layers > 0)
      p.further_layers = further_.data() + buffer * p.num_further_layers;
    return p;
  }

  void poison() {
    check(cudaMemset(pool_.data(), 0xFF, static_cast<size_t>(pool_.bytes())));
    check(cudaDeviceSynchronize());
  }

  std::string difference() {
    for (const TokenRange& range : checked_ranges(case_.tokens)) {
      const std::string what = "tokens from " + std::to_string(range.first) + " on";
      const std::vector<std::byte> actual = pool_.blocks_on_host(range);
      std::string text = first_difference(actual, expected(range, actual.size()), what);
      if (!text.empty()) return text;
    }
    return {};
  }

 private:
  bool is_mla() const { return case_.geometry.mla_row != MlaRow::kNone; }
  int32_t dim(size_t which) const {
    if (is_mla()) return which == 0 ? kMlaLatentDim : kMlaRopeDim;
    return which == 0 ? case_.geometry.k_dim : case_.geometry.v_dim;
  }
  int64_t row_bytes(size_t which) const {
    return int64_t{2} * case_.geometry.num_kv_heads * dim(which);
  }
  int64_t rows() const { return case_.geometry.num_layers * buffers_ * case_.tokens; }
  std::byte* row_data(size_t which, int64_t layer_index, int64_t buffer) const {
    return rows_[which].data() +
           (layer_index * buffers_ + buffer) * case_.tokens * row_bytes(which);
  }
  TensorView tensor(size_t which, std::byte* data, int64_t count) const {
    return dense_tensor(data, case_.input, count, case_.geometry.num_kv_heads, dim(which));
  }
  kernels::LayerView layer(kernels::LayerView layer) const {
    layer.encoder = case_.encoder;
    layer.key_transform = case_.transform;
    return layer;
  }
  Rope rope(const int64_t* positions, const void* cos, const void* sin) const {
    Rope rope;
    if (case_.rope == RopeCase::kNone) return rope;
    rope.dim = dim(0);
    rope.positions = positions;
    if (case_.rope == RopeCase::kTheta) return rope;
    rope.cos = cos;
    rope.sin = sin;
    rope.table_stride = rope.dim / 2;
    rope.table_rows = kRopeRows;
    return rope;
  }
  kernels::FurtherLayer further_layer(const kernels::LayerView& first, int64_t buffer,
                                      int64_t index) const {
    return {first.base + index * first.page.page_bytes,
            row_data(0, index, buffer),
            row_data(1, index, buffer),
            is_centred(case_.transform) ? offset_.as<float>() : nullptr,
            kScale,
            kScale};
  }

  // What the CPU's row makes of a range's tokens, layer after layer.
  std::vector<std::byte> expected(const TokenRange& range, size_t size) const {
    std::vector<std::byte> blocks(size, std::byte{0xFF});
    std::vector<int64_t> slots(static_cast<size_t>(range.count));
    std::iota(slots.begin(), slots.end(), 0);
    for (int32_t index = 0; index < case_.geometry.num_layers; ++index) {
      std::array<std::vector<std::byte>, 2> rows;
      for (size_t i = 0; i < 2; ++i)
        rows[i] =
            to_host(row_data(i, index, 0) + range.first * row_bytes(i), range.count * row_bytes(i));
      AppendParams p;
      p.layer = layer(pool_.layer_on_host(blocks));
      p.layer.base += index * p.layer.page.page_bytes;
      if (is_centred(case_.transform)) p.layer.key_offset = host_offset_.data();
      p.k = tensor(0, rows[0].data(), range.count);
      p.v = tensor(1, rows[1].data(), range.count);
      p.slots = slots.data();
      p.num_slots = range.count;
      p.rope = rope(host_positions_.data() + range.first, host_tables_[0].data(),
                    host_tables_[1].data());
      must(run_append(p));
    }
    return blocks;
  }

  AppendCase case_;
  int64_t buffers_;
  GpuPool pool_;
  std::array<DeviceMemory, 2> rows_;
  DeviceMemory slots64_, slots32_;
  std::vector<float> host_offset_;
  DeviceMemory offset_;
  std::array<std::vector<float>, 2> host_tables_;
  std::vector<DeviceMemory> tables_;
  std::vector<int64_t> host_positions_;
  std::optional<DeviceMemory> positions_;
  std::vector<kernels::FurtherLayer> further_;
};

void run_case(Bench& bench, const AppendCase& a) {
  constexpr std::array<const char*, 3> kRope = {"none", "tables", "theta"};
  const char* rope = kRope[static_cast<size_t>(a.rope)];
  const AttentionGeometry& g = a.geometry;
  Item item;
  std::ostringstream label;
  label << "append/" << format_of(g) << '/' << name(a.encoder) << '/' << name(a.transform) << '/'
        << name(a.input) << "/d" << g.k_dim << "/layers" << g.num_layers << "/rope_" << rope
        << (a.slots32 ? "/slots32/" : "/slots64/") << a.tokens;
  item.label = label.str();
  if (!bench.wants(item.label)) return;
  item.fields = shape_fields("append", g, a.tokens);
  item.fields.update({{"encoder", name(a.encoder)},
                      {"key_transform", name(a.transform)},
                      {"input", name(a.input)},
                      {"rope", rope},
                      {"slot_bits", a.slots32 ? 32 : 64}});
  const int64_t dims = g.mla_row != MlaRow::kNone ? kMlaKeyDim : g.k_dim + g.v_dim;
  item.bytes_read = a.tokens * (g.num_layers * g.num_kv_heads * dims * 2 + (a.slots32 ? 4 : 8) +
                                (a.rope == RopeCase::kNone ? 0 : 8));
  item.bytes_written = a.tokens * g.num_layers * stored_token_bytes(g);
  item.buffers = buffers_for(item.bytes_read + item.bytes_written);
  AppendItem memory(a, item.buffers);
  Status status = validate_append(memory.params(0), kernels::Tables::kDevice);
  if (status.ok())
    status = add_rows(item, kernels::append_kernels(),
                      [&memory](int64_t buffer) { return memory.params(buffer); });
  if (!status.ok()) return bench.skip(item.label, item.fields, status);
  item.poison = [&] { memory.poison(); };
  item.difference = [&] { return memory.difference(); };
  bench.measure(item);
}

void encoders_and_formats(Bench& bench, int64_t tokens) {
  const AttentionGeometry nvfp4 = attention(KvFormat::kNvfp4, 8, 128);
  for (int encoder = 0; encoder < 3; ++encoder)
    for (int transform = 0; transform < 4; ++transform)
      run_case(bench, {nvfp4, tokens, static_cast<Encoder>(encoder),
                       static_cast<KeyTransform>(transform)});
  run_case(bench, {nvfp4, tokens, Encoder::kReference, KeyTransform::kNone, Dtype::kFp16});
  for (const KvFormat format : {KvFormat::kFp8E4m3, KvFormat::kFp8E5m2, KvFormat::kBf16})
    run_case(bench, {attention(format, 8, 128), tokens});
}

void dims_and_rows(Bench& bench) {
  constexpr int64_t kTokens = 32768;
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kBf16}) {
    run_case(bench, {attention(format, 8, 64), kTokens});
    run_case(bench, {attention(format, 4, 256), kTokens});
  }
  for (const MlaRow row : {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16})
    run_case(bench, {mla_geometry(1, 16, row), kTokens});
}

void beside_rows(Bench& bench) {
  for (const int64_t tokens : {int64_t{256}, int64_t{32768}})
    for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kBf16}) {
      AppendCase a = {attention(format, 8, 128), tokens};
      a.slots32 = true;
      run_case(bench, a);
      for (const RopeCase rope : {RopeCase::kTables, RopeCase::kTheta}) {
        a.rope = rope;
        run_case(bench, a);
      }
    }
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kBf16}) {
    AppendCase a = {attention(format, 8, 128, 16, 32), 256};
    run_case(bench, a);
    a.slots32 = true;
    a.rope = RopeCase::kTables;
    run_case(bench, a);
  }
}

}  // namespace

void bench_append(Bench& bench) {
  for (const int64_t tokens : {1, 32, 256, 2048, 8192, 32768}) {
    bench.begin_group("append of " + std::to_string(tokens));
    encoders_and_formats(bench, tokens);
  }
  bench.begin_group("append of other dims and MLA rows");
  dims_and_rows(bench);
  bench.begin_group("append with int32 slots, RoPE, further layers");
  beside_rows(bench);
}

}  // namespace larder::test
