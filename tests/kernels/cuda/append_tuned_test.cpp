// append on the GPU of calls that the tuned rows take: the bytes of every layer equal those after
// the CPU's append, by the tuned row and by the portable one.
#include "tests/kernels/cuda/append_case.h"

namespace larder::kernels {
namespace {

using test::AppendCase;
using test::draw;
using test::pick;

void run_tuned(AppendCase c, std::mt19937_64& engine) {
  c.aligned = true;
  const auto names = run_append_case(c, engine);
  const bool is_mla = c.geometry.mla_row != MlaRow::kNone;
  CAPTURE(text_of(c));
  CHECK(test::has_name(names, is_mla ? "cuda_append_mla" : "cuda_append_rows"));
  CHECK(test::has_name(names, "cuda_append"));
}

// Small blocks of few heads would leave V's region between two multiples of 16.
AttentionGeometry tuned_geometry(KvFormat k, KvFormat v, int32_t k_dim, int32_t v_dim,
                                 std::mt19937_64& engine) {
  const auto block_tokens = pick<int32_t>(engine, {1, 16, 16, 32, 64});
  const auto heads = static_cast<int32_t>(block_tokens == 1 ? 16 : draw(engine, 1, 9));
  return {1, heads, block_tokens, k_dim, v_dim, k, v};
}

int32_t any_tuned_dim(std::mt19937_64& engine) { return pick(engine, {32, 64, 128, 256, 512}); }

int64_t any_rows(std::mt19937_64& engine) {
  return pick<int64_t>(engine, {1, 2, 3, 4, 5, 8, 17, 40, 130});
}

AppendCase any_tuned(std::mt19937_64& engine) {
  AppendCase c = test::any_append(engine);
  c.k_dtype = pick(engine, {Dtype::kBf16, Dtype::kBf16, Dtype::kFp16});
  c.v_dtype = draw(engine, 0, 2) == 0 ? pick(engine, {Dtype::kBf16, Dtype::kFp16}) : c.k_dtype;
  c.rows = any_rows(engine);
  return c;
}

TEST_CASE("aligned rows of every pair of formats, transform and encoder have the CPU's bytes") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7301);
  for (int k = 0; k < 5; ++k)
    for (int v = 0; v < 5; ++v)
      for (int transform = 0; transform < 4; ++transform)
        for (int encoder = 0; encoder < 3; ++encoder)
          for (const bool alike : {true, false}) {
            AppendCase c = any_tuned(engine);
            c.transform = static_cast<KeyTransform>(transform);
            c.encoder = static_cast<Encoder>(encoder);
            const int32_t k_dim = any_tuned_dim(engine);
            c.geometry = tuned_geometry(static_cast<KvFormat>(k), static_cast<KvFormat>(v), k_dim,
                                        alike ? k_dim : any_tuned_dim(engine), engine);
            if (alike) c.v_dtype = c.k_dtype;
            run_tuned(c, engine);
          }
}

TEST_CASE("aligned rows of every dim and input have the CPU's bytes for hundreds of tokens") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7302);
  for (const int32_t dim : {32, 64, 128, 256, 512})
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16})
      for (int format = 0; format < 5; ++format)
        for (int encoder = 0; encoder < 3; ++encoder) {
          const auto kv_format = static_cast<KvFormat>(format);
          if (encoder > 0 && kv_format != KvFormat::kNvfp4) continue;
          AppendCase c = any_tuned(engine);
          c.geometry = {1, 3, pick(engine, {16, 64, 256}), dim, dim, kv_format, kv_format};
          c.encoder = static_cast<Encoder>(encoder);
          c.transform = static_cast<KeyTransform>(draw(engine, 0, 3));
          c.k_dtype = c.v_dtype = dtype;
          c.rows = draw(engine, 200, 390);
          run_tuned(c, engine);
        }
}

TEST_CASE("aligned rows that are turned have the CPU's bytes in every format and part of a row") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7303);
  for (int format = 0; format < 5; ++format)
    for (int transform = 0; transform < 4; ++transform)
      for (const int32_t dim : {32, 64, 128, 256, 512})
        for (const int32_t rope_dim : {32, 64, 96, 128, 256})
          for (const bool interleaved : {false, true}) {
            if (rope_dim > dim) continue;
            AppendCase c = any_tuned(engine);
            const auto k_format = static_cast<KvFormat>(format);
            const bool alike = draw(engine, 0, 1) == 0;
            c.geometry = tuned_geometry(
                k_format, alike ? k_format : static_cast<KvFormat>(draw(engine, 0, 4)), dim,
                alike ? dim : any_tuned_dim(engine), engine);
            c.transform = static_cast<KeyTransform>(transform);
            c.rope_dim = rope_dim;
            c.interleaved = interleaved;
            run_tuned(c, engine);
          }
}

TEST_CASE("40 layers of one call have the CPU's bytes") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7304);
  for (const bool alike : {true, false})
    for (const int64_t rows : {1, 3, 4, 5, 300}) {
      AppendCase c = any_tuned(engine);
      const KvFormat v_format = alike ? KvFormat::kNvfp4 : KvFormat::kFp8E4m3;
      c.geometry = {1, 2, 16, 128, 128, KvFormat::kNvfp4, v_format};
      c.transform = static_cast<KeyTransform>(draw(engine, 0, 3));
      c.rope_dim = pick(engine, {0, 32, 128});
      c.rows = rows;
      c.num_layers = 40;
      run_tuned(c, engine);
      c.geometry = mla_geometry(1, 64, static_cast<MlaRow>(draw(engine, 1, 4)));
      c.encoder = Encoder::kReference;  // the only one of MLA rows
      c.transform = KeyTransform::kNone;
      c.v_dtype = c.k_dtype;
      c.rope_dim = pick(engine, {0, 64});
      run_tuned(c, engine);
    }
}

TEST_CASE("aligned MLA rows of every format have the CPU's bytes, turned or not") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7305);
  for (int row = 1; row <= 4; ++row)
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16})
      for (const int32_t block_tokens : {1, 16, 64})
        for (const int32_t rope_dim : {0, 4, 32, 64})
          for (int repeat = 0; repeat < 3; ++repeat) {
            AppendCase c = any_tuned(engine);
            c.geometry = mla_geometry(1, block_tokens, static_cast<MlaRow>(row));
            c.encoder = Encoder::kReference;  // the only one of MLA rows
            c.k_dtype = c.v_dtype = dtype;
            c.rope_dim = rope_dim;
            run_tuned(c, engine);
          }
}

TEST_CASE("no aligned rows, and so many that CTAs take all heads, have the CPU's bytes") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7306);
  for (const int64_t rows : {0, 20001})
    for (const KeyTransform transform : {KeyTransform::kNone, KeyTransform::kCentredRotated}) {
      AppendCase c;
      c.geometry = {1, 5, 16, 64, 64, KvFormat::kNvfp4, KvFormat::kNvfp4};
      c.transform = transform;
      c.rows = rows;
      c.further_rows = 1;
      run_tuned(c, engine);
      c.geometry = mla_geometry(1, 64, MlaRow::kNvfp4Ds);
      c.transform = KeyTransform::kNone;
      run_tuned(c, engine);
    }
}

}  // namespace
}  // namespace larder::kernels
