// attend on a GPU as decoding uses it: random calls that the tuned row takes, and batches of every
// size.
#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

TEST_CASE("random decode calls give the CPU's result on every row, the tuned one among them") {
  if (!has_gpu()) return;
  auto engine = random_engine(7400);
  CAPTURE(seed());
  for (int round = 0; round < 200; ++round)
    random_decode_case(engine).check_tuned("round " + std::to_string(round));
}

TEST_CASE("every format, dim, block size and group decodes") {
  if (!has_gpu()) return;
  auto engine = random_engine(7401);
  CAPTURE(seed());
  const int64_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16};
  size_t turn = 0;
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t block_tokens : {16, 32, 64, 128})
        for (const int64_t q_len : {1, 3}) {
          const auto rows = static_cast<int32_t>(q_len);
          AttendCase one(decode_geometry(format, 2, block_tokens, dim), 2 * groups[turn++ % 10],
                         {{rows, 300}, {rows, 77}, {rows, 128}, {rows, 5}}, engine);
          one.check_tuned("shape");
        }
}

TEST_CASE("any group size, also those that fill no tile") {
  if (!has_gpu()) return;
  auto engine = random_engine(7402);
  CAPTURE(seed());
  for (int64_t group = 1; group <= 24; ++group)
    for (const KvFormat format : kDecodeFormats) {
      AttendCase one(decode_geometry(format, 1, 16, 128), group, {{1, 200}, {2, 33}, {1, 64}},
                     engine);
      one.check_tuned("group");
    }
  AttendCase wide(decode_geometry(KvFormat::kNvfp4, 2, 16, 128), 2 * 128, {{1, 200}, {3, 33}},
                  engine);
  wide.check_tuned("128 heads to a KV head");
}

TEST_CASE("no sequence, only empty rows, and sequences without a row among others") {
  if (!has_gpu()) return;
  auto engine = random_engine(7403);
  CAPTURE(seed());
  for (const auto& lengths : {std::vector<Lengths>{},
                              {{0, 0}},
                              {{0, 300}, {0, 5}},
                              {{1, 0}, {1, 0}, {1, 0}},
                              {{3, 0}, {2, 1}},
                              {{0, 40}, {1, 0}, {0, 0}, {1, 500}, {0, 9}, {4, 2}, {0, 70}}})
    for (const int32_t splits : {0, 1, 8})
      for (const bool deterministic : {false, true})
        for (const bool includes_sink : {false, true}) {
          AttendCase one(decode_geometry(KvFormat::kNvfp4, 2, 16, 128), 16, lengths, engine);
          one.params.num_splits = splits;
          one.params.deterministic = deterministic;
          one.spec.lse_form.includes_sink = includes_sink;
          one.set_sinks(engine);
          one.check_tuned("empty");
        }
}

TEST_CASE("hundreds of sequences in one call") {
  if (!has_gpu()) return;
  auto engine = random_engine(7404);
  CAPTURE(seed());
  for (const bool deterministic : {false, true})
    for (const bool is_ragged : {false, true}) {
      std::vector<Lengths> middle, many;
      const auto rows = [&] { return static_cast<int32_t>(is_ragged ? draw(engine, 0, 4) : 1); };
      for (int i = 0; i < 300; ++i)
        middle.push_back({rows(), static_cast<int32_t>(draw(engine, 0, 400))});
      middle[17].seq_len = 5000;
      for (int i = 0; i < 1500; ++i)
        many.push_back({rows(), static_cast<int32_t>(draw(engine, 0, 40))});
      for (const auto& lengths : {middle, many}) {
        AttendCase one(decode_geometry(KvFormat::kNvfp4, 1, 16, 128), 8, lengths, engine);
        one.params.deterministic = deterministic;
        one.check_tuned("many sequences");
      }
    }
}

TEST_CASE("one long sequence among short ones, with every number of splits") {
  if (!has_gpu()) return;
  auto engine = random_engine(7405);
  CAPTURE(seed());
  AttendCase one(decode_geometry(KvFormat::kFp8E4m3, 1, 64, 128), 8,
                 {{1, 30}, {1, 20000}, {1, 3}, {2, 700}}, engine);
  const Outputs expected = one.run_cpu();
  for (const int32_t splits : {0, 1, 2, 3, 7, 8, 64, 300, 4096})
    for (const bool deterministic : {false, true}) {
      one.params.num_splits = splits;
      one.params.deterministic = deterministic;
      one.check_tuned("splits", expected);
    }
}

// Rows from a few to more than any decode has, around the edge of 64.
TEST_CASE("rows with one query are equal however many of them a sequence has") {
  if (!has_gpu()) return;
  auto engine = random_engine(7406);
  CAPTURE(seed());
  for (const int32_t q_len : {1, 16, 17, 63, 64, 65, 128}) {
    AttendCase one(decode_geometry(KvFormat::kNvfp4, 1, 16, 128), 4, {{q_len, 200}}, engine);
    one.params.causal = false;
    const auto row_bytes = static_cast<int64_t>(one.q.size()) / q_len;
    for (int64_t row = 1; row < q_len; ++row)
      std::copy_n(one.q.begin(), row_bytes, one.q.begin() + row * row_bytes);
    one.check_tuned("equal rows");
  }
}

TEST_CASE("the stride of an axis with one entry means nothing") {
  if (!has_gpu()) return;
  auto engine = random_engine(7407);
  CAPTURE(seed());
  AttendCase one(decode_geometry(KvFormat::kNvfp4, 1, 16, 128), 1, {{1, 100}}, engine);
  const Outputs expected = one.run_cpu();
  for (const int64_t stride : {int64_t{7}, int64_t{0}, int64_t{1} << 40}) {
    const auto runs = one.run_cuda(nullptr, [&](kernels::AttendParams& made) {
      made.q.strides[0] = made.q.strides[1] = stride;
      made.output.out.strides[0] = made.output.out.strides[1] = stride;
    });
    one.compare(runs, expected, "stride " + std::to_string(stride));
  }
}

// What run_attend picks is the first row that takes the call.
TEST_CASE("run_attend gives the bits of the first row that takes the call") {
  if (!has_gpu()) return;
  auto engine = random_engine(7408);
  CAPTURE(seed());
  AttendCase one(decode_geometry(KvFormat::kNvfp4, 2, 16, 128), 16, {{1, 300}, {2, 70}}, engine);
  const auto runs = one.run_cuda();
  REQUIRE(!runs.empty());
  Uploads uploads;
  const DeviceOutputs device(poisoned(one.output()));
  kernels::AttendParams made = one.call(uploads);
  device.point(made.output);
  const auto bytes = kernels::attend_workspace_bytes(made, kernels::Backend::kCuda);
  REQUIRE(bytes.ok());
  const DeviceBytes workspace(static_cast<size_t>(*bytes));
  check_ok(kernels::run_attend(
      made, {kernels::Backend::kCuda, nullptr, workspace.data(), *bytes, nullptr, nullptr}));
  const Outputs got = device.read();
  for (size_t s = 0; s < one.q_lens.size(); ++s)
    check_same_bits(result_bytes(one, got, s), result_bytes(one, runs[0].outputs, s),
                    std::string(runs[0].row));
}

}  // namespace
}  // namespace larder::test
