// gather on a GPU, by block table, and convert to and from pages of an engine's own.
#include <array>

#include "tests/bench/gpu_pool.h"

namespace larder::test {
namespace {

using kernels::AppendParams;
using kernels::ConvertParams;
using kernels::GatherParams;

// Gives the blocks of every call normally distributed tokens.
void fill_by_append(Bench& bench, const GpuPool& pool, int64_t tokens, int64_t buffers) {
  const AttentionGeometry& g = pool.layer().geometry;
  const bool is_mla = g.mla_row != MlaRow::kNone;
  const int32_t dims[2] = {is_mla ? kMlaLatentDim : g.k_dim, is_mla ? kMlaRopeDim : g.v_dim};
  const DeviceMemory slots(pool.slots<int64_t>(buffers));
  const DeviceMemory k(tokens * g.num_kv_heads * dims[0] * 2);
  const DeviceMemory v(tokens * g.num_kv_heads * dims[1] * 2);
  kernels::Target target;
  target.backend = kernels::Backend::kCuda;
  target.stream = bench.stream();
  for (int64_t buffer = 0; buffer < buffers; ++buffer) {
    const auto seed = static_cast<uint64_t>(2 * buffer);
    launch_fill(k.data(), k.bytes(), Fill::kBf16, 100 + seed, bench.stream());
    launch_fill(v.data(), v.bytes(), Fill::kBf16, 101 + seed, bench.stream());
    AppendParams p;
    p.layer = pool.layer();
    p.k = dense_tensor(k.data(), Dtype::kBf16, tokens, g.num_kv_heads, dims[0]);
    p.v = dense_tensor(v.data(), Dtype::kBf16, tokens, g.num_kv_heads, dims[1]);
    p.slots = slots.as<int64_t>() + buffer * tokens;
    p.num_slots = tokens;
    must(run_append(p, target));
  }
  check(cudaStreamSynchronize(bench.stream()));
}

class GatherItem {
 public:
  GatherItem(Bench& bench, const AttentionGeometry& g, int64_t tokens, Dtype out, int64_t buffers)
      : tokens_(tokens),
        out_(out),
        pool_(g, tokens, buffers),
        k_(buffers * k_bytes()),
        v_(buffers * v_bytes()),
        seq_len_(std::vector<int32_t>{static_cast<int32_t>(tokens)}) {
    fill_by_append(bench, pool_, tokens, buffers);
  }

  GatherParams params(int64_t buffer) const {
    GatherParams p;
    p.layer = pool_.layer();
    p.k_out = tensor(k_.data() + buffer * k_bytes(), tokens_, p.layer.geometry.k_dim);
    if (!is_mla()) p.v_out = tensor(v_.data() + buffer * v_bytes(), tokens_, geometry().v_dim);
    p.block_table = pool_.blocks_of(buffer);
    p.block_table_stride = pool_.blocks_per_call();
    p.seq_lens = seq_len_.as<int32_t>();
    p.num_seqs = 1;
    return p;
  }

  void poison() {
    check(cudaMemset(k_.data(), 0xFF, static_cast<size_t>(k_.bytes())));
    check(cudaMemset(v_.data(), 0xFF, static_cast<size_t>(v_.bytes())));
    check(cudaDeviceSynchronize());
  }

  std::string difference() {
    for (const TokenRange& range : checked_ranges(tokens_)) {
      std::vector<std::byte> blocks = pool_.blocks_on_host(range);
      GatherParams p;
      p.layer = pool_.layer_on_host(blocks);
      std::vector<std::byte> k(static_cast<size_t>(range.count * k_bytes() / tokens_));
      std::vector<std::byte> v(static_cast<size_t>(range.count * v_bytes() / tokens_));
      p.k_out = tensor(k.data(), range.count, geometry().k_dim);
      if (!is_mla()) p.v_out = tensor(v.data(), range.count, geometry().v_dim);
      std::vector<int32_t> table(static_cast<size_t>(p.layer.num_blocks));
      std::iota(table.begin(), table.end(), 0);
      const auto seq_len = static_cast<int32_t>(range.count);
      p.block_table = table.data();
      p.block_table_stride = p.layer.num_blocks;
      p.seq_lens = &seq_len;
      p.num_seqs = 1;
      must(run_gather(p));
      const std::string what = " of tokens from " + std::to_string(range.first) + " on";
      std::string text = compare(k_, k_bytes(), range, k, "k" + what);
      if (text.empty()) text = compare(v_, v_bytes(), range, v, "v" + what);
      if (!text.empty()) return text;
    }
    return {};
  }

 private:
  const AttentionGeometry& geometry() const { return pool_.layer().geometry; }
  bool is_mla() const { return geometry().mla_row != MlaRow::kNone; }
  int64_t k_bytes() const {
    return tokens_ * geometry().num_kv_heads * geometry().k_dim * dtype_bytes(out_);
  }
  int64_t v_bytes() const {
    return is_mla() ? 0 : tokens_ * geometry().num_kv_heads * geometry().v_dim * dtype_bytes(out_);
  }
  TensorView tensor(std::byte* data, int64_t count, int32_t dim) const {
    return dense_tensor(data, out_, count, geometry().num_kv_heads, dim);
  }
  // Rows of call 0 with what the CPU made.
  std::string compare(const DeviceMemory& out, int64_t call_bytes, const TokenRange& range,
                      const std::vector<std::byte>& expected, const std::string& what) const {
    const auto actual =
        to_host(out.data() + range.first * call_bytes / tokens_, std::ssize(expected));
    return first_difference(actual, expected, what);
  }

  int64_t tokens_;
  Dtype out_;
  GpuPool pool_;
  DeviceMemory k_, v_;
  DeviceMemory seq_len_;
};

void gather_case(Bench& bench, const AttentionGeometry& g, int64_t tokens, Dtype out) {
  Item item;
  std::ostringstream label;
  label << "gather/" << format_of(g) << '/' << name(out) << "/d" << g.k_dim << '/' << tokens;
  item.label = label.str();
  if (!bench.wants(item.label)) return;
  item.fields = shape_fields("gather", g, tokens);
  item.fields["output"] = name(out);
  const int64_t dims = g.mla_row != MlaRow::kNone ? kMlaKeyDim : g.k_dim + g.v_dim;
  item.bytes_read = tokens * stored_token_bytes(g) + tokens / g.block_tokens * 4;
  item.bytes_written = tokens * g.num_kv_heads * dims * dtype_bytes(out);
  item.buffers = buffers_for(item.bytes_read + item.bytes_written);
  GatherItem memory(bench, g, tokens, out, item.buffers);
  Status status = validate_gather(memory.params(0), kernels::Tables::kDevice);
  if (status.ok())
    status = add_rows(item, kernels::gather_kernels(),
                      [&memory](int64_t buffer) { return memory.params(buffer); });
  if (!status.ok()) return bench.skip(item.label, item.fields, status);
  item.poison = [&] { memory.poison(); };
  item.difference = [&] { return memory.difference(); };
  bench.measure(item);
}

struct ConvertCase {
  AttentionGeometry geometry;
  int32_t page_tokens;
  PageOrder order;
  bool to_pool;
};

class ConvertItem {
 public:
  ConvertItem(Bench& bench, const ConvertCase& c, int64_t tokens, int64_t buffers)
      : case_(c),
        pages_per_call_(tokens / c.page_tokens),
        page_geometry_(c.geometry),
        pool_(c.geometry, tokens, buffers),
        tokens_(tokens),
        pages_(buffers * tokens * stored_token_bytes(c.geometry)) {
    page_geometry_.block_tokens = c.page_tokens;
    launch_fill(pool_.data(), pool_.bytes(), Fill::kBits, 5, bench.stream());
    launch_fill(pages_.data(), pages_.bytes(), Fill::kBits, 6, bench.stream());
    check(cudaStreamSynchronize(bench.stream()));
  }

  ConvertParams params(int64_t buffer) const {
    return {pool_.layer(), pool_.blocks_of(buffer), pool_.blocks_per_call(),
            dense_pages(pages_.data() + buffer * pages_per_call_ * page_bytes(), page_geometry_,
                        pages_per_call_, case_.order),
            case_.to_pool};
  }

  // Only what will be written.
  void poison() {
    if (case_.to_pool)
      check(cudaMemset(pool_.data(), 0xFF, static_cast<size_t>(pool_.bytes())));
    else
      check(cudaMemset(pages_.data(), 0xFF, static_cast<size_t>(pages_.bytes())));
    check(cudaDeviceSynchronize());
  }

  std::string difference() {
    for (const TokenRange& range : checked_ranges(tokens_)) {
      const auto blocks = pool_.blocks_on_host(range);
      const auto pages = to_host(pages_.data() + range.first / case_.page_tokens * page_bytes(),
                                 range.count / case_.page_tokens * page_bytes());
      auto expected_blocks = blocks;
      auto expected_pages = pages;
      // What the CPU writes is poisoned first, so that nothing is equal by being left alone.
      auto& written = case_.to_pool ? expected_blocks : expected_pages;
      std::fill(written.begin(), written.end(), std::byte{0xFF});
      const kernels::LayerView layer = pool_.layer_on_host(expected_blocks);
      std::vector<int32_t> list(static_cast<size_t>(layer.num_blocks));
      std::iota(list.begin(), list.end(), 0);
      must(kernels::run_convert({layer, list.data(), layer.num_blocks,
                                 dense_pages(expected_pages.data(), page_geometry_,
                                             range.count / case_.page_tokens, case_.order),
                                 case_.to_pool}));
      const std::string what = "tokens from " + std::to_string(range.first) + " on";
      std::string text = case_.to_pool ? first_difference(blocks, expected_blocks, what)
                                       : first_difference(pages, expected_pages, what);
      if (!text.empty()) return text;
    }
    return {};
  }

 private:
  int64_t page_bytes() const { return page_layout(page_geometry_).page_bytes; }

  ConvertCase case_;
  int64_t pages_per_call_;
  AttentionGeometry page_geometry_;
  GpuPool pool_;
  int64_t tokens_;
  DeviceMemory pages_;
};

void convert_case(Bench& bench, const ConvertCase& c) {
  constexpr int64_t kTokens = 32768;
  Item item;
  std::ostringstream label;
  label << "convert/" << format_of(c.geometry) << "/blocks" << c.geometry.block_tokens << "/pages"
        << c.page_tokens << '/' << name(c.order) << (c.to_pool ? "/to_pool" : "/from_pool");
  item.label = label.str();
  if (!bench.wants(item.label)) return;
  item.fields = shape_fields("convert", c.geometry, kTokens);
  item.fields.update(
      {{"page_tokens", c.page_tokens}, {"page_order", name(c.order)}, {"to_pool", c.to_pool}});
  item.bytes_read = item.bytes_written = kTokens * stored_token_bytes(c.geometry);
  item.buffers = buffers_for(item.bytes_read + item.bytes_written);
  ConvertItem memory(bench, c, kTokens, item.buffers);
  Status status = validate_convert(memory.params(0), kernels::Tables::kDevice);
  if (status.ok())
    status = add_rows(item, kernels::convert_kernels(),
                      [&memory](int64_t buffer) { return memory.params(buffer); });
  if (!status.ok()) return bench.skip(item.label, item.fields, status);
  item.poison = [&] { memory.poison(); };
  item.difference = [&] { return memory.difference(); };
  bench.measure(item);
}

}  // namespace

void bench_gather(Bench& bench) {
  for (const int64_t tokens : {2048, 8192, 32768, 131072}) {
    bench.begin_group("gather of " + std::to_string(tokens));
    for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kBf16})
      gather_case(bench, attention(format, 8, 128), tokens, Dtype::kBf16);
    for (const MlaRow row : {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16})
      for (const Dtype out : {Dtype::kBf16, Dtype::kFp8E4m3})
        gather_case(bench, mla_geometry(1, 16, row), tokens, out);
  }
}

void bench_convert(Bench& bench) {
  bench.begin_group("convert");
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kBf16})
    for (const int32_t block_tokens : {16, 64})
      for (const int32_t page_tokens : {16, 64})
        for (const PageOrder order : {PageOrder::kNhd, PageOrder::kHnd})
          for (const bool to_pool : {false, true}) {
            // Pages that are the pool's own are copied, which is no conversion.
            if (block_tokens == page_tokens && order == PageOrder::kHnd) continue;
            convert_case(bench,
                         {attention(format, 8, 128, block_tokens), page_tokens, order, to_pool});
          }
}

}  // namespace larder::test
