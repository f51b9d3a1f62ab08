// attend on a GPU: which calls give the same bits.
#include <numeric>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

using Runs = std::vector<AttendCase::CudaRun>;

// That the sequences `chosen` have in `got` (in that order) the bits that they have in `whole`.
void check_sequences(const AttendCase& batch, const Runs& whole, AttendCase& part, const Runs& got,
                     const std::vector<size_t>& chosen, const std::string& what) {
  REQUIRE(got.size() == whole.size());
  for (size_t i = 0; i < got.size(); ++i) {
    REQUIRE(got[i].row == whole[i].row);
    CHECK(got[i].fault_count == 0);
    int64_t wrong = 0;
    std::string first;
    for (size_t place = 0; place < chosen.size(); ++place) {
      const std::string found = differences(result_bytes(part, got[i].outputs, place),
                                            result_bytes(batch, whole[i].outputs, chosen[place]));
      if (found.empty() || ++wrong > 1) continue;
      first = "sequence " + std::to_string(chosen[place]) + " (q_len " +
              std::to_string(part.q_lens[place]) + ", seq_len " +
              std::to_string(part.seq_lens[place]) + "): " + found;
    }
    INFO(got[i].row << ", " << what << ": " << batch.describe());
    CHECK_MESSAGE(wrong == 0, first << "; " << wrong << " sequences differ");
  }
}

std::vector<Lengths> mixed_lengths(size_t count, bool is_decode, std::mt19937_64& engine) {
  std::vector<Lengths> lengths;
  for (size_t s = 0; s < count; ++s)
    lengths.push_back({static_cast<int32_t>(is_decode ? 1 : draw(engine, 0, 5)),
                       pick<int32_t>(engine, {0, 1, 16, 17, 63, 64, 65, 129, 257, 600, 1000})});
  lengths[3].seq_len = 9000;
  if (!is_decode) lengths[4] = {40, 700};
  return lengths;
}

void check_deterministic(AttendCase& batch, std::mt19937_64& engine) {
  batch.params.deterministic = true;
  const Runs whole = batch.run_cuda();
  batch.compare(whole, batch.run_cpu(), "deterministic");
  std::vector<size_t> all(batch.q_lens.size());
  std::iota(all.begin(), all.end(), size_t{0});
  const auto check_part = [&](const std::vector<size_t>& chosen, int64_t more,
                              const std::string& what) {
    AttendCase part = take_sequences(batch, chosen, more);
    check_sequences(batch, whole, part, part.run_cuda(), chosen, what);
  };
  check_part(all, 0, "again");
  check_part(all, 4000, "in a wider table");
  std::shuffle(all.begin(), all.end(), engine);
  check_part(all, 0, "in another order");
  check_part({all.begin(), all.begin() + 5}, 3, "five of them");
  for (const size_t s : {size_t{3}, all[0], all[1], all[2]}) check_part({s}, 0, "alone");
  check_part({3}, 20000, "alone in a wider table");
  std::vector<size_t> thrice = all;
  for (int i = 0; i < 2; ++i) thrice.insert(thrice.end(), all.begin(), all.end());
  check_part(thrice, 0, "three times over");
}

TEST_CASE("a deterministic sequence has the same bits alone, in any batch and in any table") {
  if (!has_gpu()) return;
  auto engine = random_engine(7800);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const bool is_decode : {true, false})
      for (const int32_t splits : {0, 3}) {
        AttendCase batch(decode_geometry(format, 1, 16, 64), 8,
                         mixed_lengths(38, is_decode, engine), engine);
        batch.params.num_splits = splits;
        check_deterministic(batch, engine);
      }
}

TEST_CASE("options keep determinism") {
  if (!has_gpu()) return;
  auto engine = random_engine(7801);
  CAPTURE(seed());
  for (int option = 0; option < 9; ++option) {
    AttendCase batch(decode_geometry(KvFormat::kNvfp4, 2, 64, 64), 8,
                     mixed_lengths(38, option % 2 == 0, engine), engine, 0,
                     option == 0 ? ContextShard{3, 1, 16} : ContextShard{});
    if (option == 1) batch.set_random_mask(engine);
    if (option == 2) batch.set_sinks(engine);
    if (option == 3) batch.set_transform(KeyTransform::kCentredRotated, engine);
    if (option == 4) batch.params.soft_cap = 5.0f;
    // Not used: a prefix that is shared in one batch alone would change bits.
    if (option == 5) batch.params.shared_prefix_tokens = kFindSharedPrefix;
    if (option == 6) batch.params.num_splits = 1;
    if (option == 7) batch.params.num_splits = 256;
    if (option == 8) batch.params.window_left = 300;
    check_deterministic(batch, engine);
  }
}

TEST_CASE(
    "rows whose parts pass the workspace are taken in turns, with the bits of one at a time") {
  if (!has_gpu()) return;
  auto engine = random_engine(7806);
  CAPTURE(seed());
  // 256 parts of 64 heads of 512 dims are 34 MB a row: 7 rows at a time.
  AttendCase batch(mla_geometry(1, 16, MlaRow::kFp8), 64, {{20, 600}, {1, 300}, {4, 4}}, engine);
  batch.params.deterministic = true;
  batch.params.num_splits = 256;
  batch.set_sinks(engine);
  batch.spec.lse_form.heads_first = true;
  batch.check("turns, heads first");
  batch.spec.lse_form.heads_first = false;
  const Runs whole = batch.run_cuda();
  batch.compare(whole, batch.run_cpu(), "turns");
  for (const size_t s : {0, 1, 2}) {
    AttendCase alone = take_sequences(batch, {s}, 17);
    check_sequences(batch, whole, alone, alone.run_cuda(), {s}, "alone");
  }
}

TEST_CASE("a deterministic call's workspace stays within the portable row's limit of parts") {
  kernels::AttendParams params;
  params.deterministic = true;
  for (const int64_t rows : {1, 1000, 1000000})
    for (const int64_t heads : {1, 32, 4096})
      for (const int32_t dim : {64, 512, 1024})
        for (const int32_t splits : {0, 1, 7, 4096}) {
          params.layer.geometry = {1, 1, 16, dim, dim, KvFormat::kBf16, KvFormat::kBf16};
          params.layer.page = page_layout(params.layer.geometry);
          params.q = dense_tensor(nullptr, Dtype::kFp32, rows, heads, dim);
          params.output.out = params.q;
          params.num_seqs = 1;
          params.block_table_stride = 1 << 20;
          params.num_splits = splits;
          const auto bytes = kernels::attend_workspace_bytes(params, kernels::Backend::kCuda);
          REQUIRE(bytes.ok());
          CHECK(*bytes <= (int64_t{256} << 20) + 1024);
        }
}

TEST_CASE("a call that is made twice gives the same bits") {
  if (!has_gpu()) return;
  auto engine = random_engine(7802);
  CAPTURE(seed());
  for (int round = 0; round < 20; ++round) {
    AttendCase one = random_decode_case(engine);
    const Runs first = one.run_cuda();
    for (int again = 0; again < 2; ++again) {
      const Runs second = one.run_cuda();
      REQUIRE(first.size() == second.size());
      for (size_t i = 0; i < first.size(); ++i) {
        INFO(first[i].row << ": " << one.describe());
        CHECK(differences(second[i].outputs.out, first[i].outputs.out).empty());
        CHECK(std::memcmp(second[i].outputs.lse.data(), first[i].outputs.lse.data(),
                          first[i].outputs.lse.size() * 4) == 0);
      }
    }
  }
}

TEST_CASE("rows between empty ones have the bits that they have alone") {
  if (!has_gpu()) return;
  auto engine = random_engine(7803);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const bool deterministic : {false, true}) {
      AttendCase batch(decode_geometry(format, 1, 16, 128), 8,
                       {{1, 0}, {1, 5}, {1, 0}, {1, 16}, {1, 0}}, engine);
      batch.params.deterministic = deterministic;
      const Runs whole = batch.run_cuda();
      for (const size_t s : {size_t{1}, size_t{3}}) {
        AttendCase alone = take_sequences(batch, {s}, 0);
        check_sequences(batch, whole, alone, alone.run_cuda(), {s}, "alone");
      }
      for (const AttendCase::CudaRun& run : whole)
        for (const size_t s : {0, 2, 4}) {
          CAPTURE(run.row);
          CHECK(run.outputs.lse[s * 8] == -INFINITY);
          CHECK(element(run.outputs.out, Dtype::kFp32, static_cast<int64_t>(s) * 8 * 128) == 0.0);
        }
    }
}

// Equal bytes in blocks of one's own, in blocks of another sequence, and in half of either.
TEST_CASE("shared blocks with the same bytes give the same bits") {
  if (!has_gpu()) return;
  auto engine = random_engine(7804);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const bool deterministic : {false, true}) {
      AttendCase one(decode_geometry(format, 2, 16, 128), 8, {{1, 700}, {1, 700}, {1, 90}}, engine);
      one.params.deterministic = deterministic;
      const auto page_bytes = one.params.layer.page.page_bytes;
      for (int64_t token = 0; token < 700; token += 16)
        std::copy_n(one.block_bytes(0, token), page_bytes, one.block_bytes(1, token));
      const Runs own = one.run_cuda();
      for (const int64_t shared : {1, 20, 44}) {
        AttendCase other = one;
        const auto stride = one.params.block_table_stride;
        std::copy_n(other.table.begin(), shared, other.table.begin() + stride);
        check_sequences(one, own, other, other.run_cuda(), {0, 1, 2},
                        std::to_string(shared) + " blocks shared");
      }
    }
}

TEST_CASE("tokens appended in chunks give the bits of tokens appended at once") {
  if (!has_gpu()) return;
  auto engine = random_engine(7805);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats) {
    AttendCase whole(decode_geometry(format, 2, 16, 128), 8, {{1, 100}}, engine);
    AttendCase chunked = whole;
    std::vector<float> k = normals(100 * 2 * 128, engine);
    std::vector<float> v = normals(100 * 2 * 128, engine);
    const auto append = [&](AttendCase& one, int64_t first, int64_t count) {
      std::vector<int64_t> slots;
      for (int64_t token = first; token < first + count; ++token)
        slots.push_back(one.table[static_cast<size_t>(token / 16)] * 16 + token % 16);
      kernels::LayerView layer = one.params.layer;
      layer.base = one.pool.data();
      check_ok(kernels::run_append(append_of(
          layer, dense_tensor(k.data() + first * 256, Dtype::kFp32, count, 2, 128),
          dense_tensor(v.data() + first * 256, Dtype::kFp32, count, 2, 128), slots.data(), count)));
    };
    append(whole, 0, 100);
    for (int64_t first = 0; first < 100;) {
      const int64_t count = std::min<int64_t>(draw(engine, 1, 25), 100 - first);
      append(chunked, first, count);
      first += count;
    }
    CHECK(differences(chunked.pool, whole.pool).empty());
    check_sequences(whole, whole.run_cuda(), chunked, chunked.run_cuda(), {0}, "in chunks");
  }
}

}  // namespace
}  // namespace larder::test
