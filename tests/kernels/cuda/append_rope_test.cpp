// append on the GPU with RoPE, slots of 32 bits and further layers, in any memory: the bytes of
// every layer equal those after the CPU's append.
#include "tests/kernels/cuda/append_case.h"

namespace larder::kernels {
namespace {

using test::AppendCase;
using test::draw;
using test::pick;

TEST_CASE("RoPE of every kind has the CPU's bytes in every format, transform and layer") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7201);
  for (int format = 0; format < 5; ++format)
    for (int transform = 0; transform < 4; ++transform)
      for (int repeat = 0; repeat < 12; ++repeat) {
        AppendCase c = test::any_append(engine);
        c.transform = static_cast<KeyTransform>(transform);
        const auto k_format = static_cast<KvFormat>(format);
        const auto v_format = static_cast<KvFormat>(draw(engine, 0, 4));
        do c.geometry = test::any_geometry(k_format, v_format, is_rotated(c.transform), engine);
        while (c.geometry.k_dim < 2);
        const int64_t largest = std::min(c.geometry.k_dim, kMaxRopeDim) / 2;
        c.rope_dim = static_cast<int32_t>(
            2 * (draw(engine, 0, 1) == 0 ? largest : draw(engine, 1, largest)));
        run_append_case(c, engine);
      }
}

TEST_CASE("RoPE of MLA rows of every format has the CPU's bytes") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7203);
  for (int row = 1; row <= 4; ++row)
    for (const int32_t block_tokens : {1, 3, 64})
      for (int repeat = 0; repeat < 6; ++repeat) {
        AppendCase c = test::any_append(engine);
        c.geometry = mla_geometry(1, block_tokens, static_cast<MlaRow>(row));
        c.encoder = Encoder::kReference;  // the only one of MLA rows
        c.rope_dim = pick(engine, {64, 64, 32, 2, 0});
        run_append_case(c, engine);
      }
}

TEST_CASE("no rows, and more rows than a grid has CTAs, are turned") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7204);
  for (const int64_t rows : {0, 1'100'000}) {
    AppendCase c;
    c.geometry = {1, 1, 16, 16, 16, KvFormat::kNvfp4, KvFormat::kFp8E4m3};
    c.rows = rows;
    c.rope_dim = 16;
    c.num_layers = 2;
    run_append_case(c, engine);
  }
}

}  // namespace
}  // namespace larder::kernels
