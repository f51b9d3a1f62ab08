// attend on a GPU: tables in device memory that nobody has checked.
#include <chrono>
#include <cstdlib>
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_case.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

// Of a kind that every row takes.
AttendCase make_case(const std::vector<Lengths>& lengths, std::mt19937_64& engine) {
  return AttendCase({1, 2, 16, 64, 64, KvFormat::kNvfp4, KvFormat::kNvfp4}, 4, lengths, engine);
}

// What the CPU gives when keys for which hidden(sequence, key) is true are not there.
template <typename Hidden>
Outputs without_keys(AttendCase one, const Hidden& hidden) {
  one.set_mask([&](int64_t s, int64_t row, int64_t key) {
    const int64_t position =
        one.seq_lens[static_cast<size_t>(s)] - one.q_lens[static_cast<size_t>(s)] + row;
    return key <= position && !hidden(s, key);
  });
  return one.run_cpu();
}

void check_faulty(AttendCase& one, const Outputs& expected, const std::string& what,
                  const kernels::BlockRights* rights = nullptr) {
  for (const AttendCase::CudaRun& run : one.run_cuda(rights)) {
    one.compare(run, expected, what);
    CAPTURE(run.row);
    CAPTURE(what);
    CHECK(run.fault_count > 0);
  }
}

TEST_CASE("tokens of a block past the pool are not seen, and it is counted") {
  if (!has_gpu()) return;
  auto engine = random_engine(7300);
  CAPTURE(seed());
  for (const int32_t splits : {0, 1, 3}) {
    AttendCase one = make_case({{4, 100}, {1, 50}}, engine);
    one.params.num_splits = splits;
    const Outputs expected =
        without_keys(one, [](int64_t s, int64_t key) { return s == 0 && key / 16 == 2; });
    const auto num_blocks = static_cast<int32_t>(one.params.layer.num_blocks);
    for (const int32_t id : {-1, num_blocks, kMax, kMin}) {
      one.table[2] = id;
      check_faulty(one, expected, "block " + std::to_string(id));
    }
  }
}

TEST_CASE("blocks are read with the right to read or to write, and with no other word") {
  if (!has_gpu()) return;
  auto engine = random_engine(7301);
  CAPTURE(seed());
  AttendCase one = make_case({{4, 100}, {1, 50}}, engine);
  std::vector<uint64_t> words(static_cast<size_t>(one.params.layer.num_blocks), 0);
  for (const int32_t block : one.table)
    if (block > 0 && block < static_cast<int32_t>(words.size()))
      words[static_cast<size_t>(block)] = engine() % 2 == 0 ? 0x123456789ABCDEF0 : 8;
  const auto run_with = [&](const std::vector<uint64_t>& all) {
    const DeviceBytes device(all);
    const kernels::BlockRights rights = {device.data<uint64_t>(), 0x123456789ABCDEF0, 8};
    return one.run_cuda(&rights);
  };
  const Outputs whole = one.run_cpu();
  for (const AttendCase::CudaRun& allowed : run_with(words)) {
    one.compare(allowed, whole, "allowed");
    CAPTURE(allowed.row);
    CHECK(allowed.fault_count == 0);
  }

  words[static_cast<size_t>(one.table[2])] = 0x9ABCDEF0;  // the lower half of the right one
  const Outputs expected =
      without_keys(one, [](int64_t s, int64_t key) { return s == 0 && key / 16 == 2; });
  for (const AttendCase::CudaRun& refused : run_with(words)) {
    one.compare(refused, expected, "refused");
    CAPTURE(refused.row);
    CHECK(refused.fault_count > 0);
  }
}

TEST_CASE("a length that is negative or passes its table is cut, and counted") {
  if (!has_gpu()) return;
  auto engine = random_engine(7302);
  CAPTURE(seed());
  const AttendCase good = make_case({{4, 100}, {2, 50}, {1, 9}}, engine);
  for (const int32_t wrong : {-1, -5, kMin}) {
    AttendCase on_cpu = good;
    on_cpu.seq_lens[1] = 0;
    AttendCase on_gpu = good;
    on_gpu.seq_lens[1] = wrong;
    check_faulty(on_gpu, on_cpu.run_cpu(), "seq_len " + std::to_string(wrong));
  }
  const int64_t limit = good.params.block_table_stride * 16;
  for (const int64_t wrong : {limit + 1, int64_t{kMax}}) {
    // The entries past the sequence's blocks are garbage: their tokens are not seen either.
    AttendCase on_cpu = good;
    on_cpu.seq_lens[1] = static_cast<int32_t>(limit);
    const auto row = static_cast<size_t>(good.params.block_table_stride);
    for (size_t i = 4; i < row; ++i) on_cpu.table[row + i] = 0;
    AttendCase on_gpu = good;
    on_gpu.seq_lens[1] = static_cast<int32_t>(wrong);
    // Tokens 50 to 63 are in the last block and have not been written yet.
    for (int64_t token = 50; token < 64; ++token)
      for (int64_t head = 0; head < 2; ++head)
        for (const bool is_key : {true, false})
          fill_row(on_gpu.stored(1, token, head, is_key), engine);
    on_cpu.pool = on_gpu.pool;
    check_faulty(on_gpu,
                 without_keys(on_cpu, [](int64_t s, int64_t key) { return s == 1 && key >= 64; }),
                 "seq_len " + std::to_string(wrong));
  }
}

// The first rows of a result that has more.
Outputs first_rows(const AttendCase& one, Outputs all, int64_t rows) {
  const auto values = static_cast<size_t>(rows * one.num_q_heads);
  all.lse.resize(values);
  all.out.resize(values * 64 * 4);
  return all;
}

TEST_CASE("more query rows than there are: those past the last are left out, and counted") {
  if (!has_gpu()) return;
  auto engine = random_engine(7303);
  CAPTURE(seed());
  AttendCase one = make_case({{4, 100}, {0, 3}, {60, 50}, {2, 20}, {1, 5}}, engine);
  const Outputs all = one.run_cpu();
  for (const int64_t rows : {3, 4, 5, 20, 63, 64, 65, 66}) {
    AttendCase fewer = one;
    fewer.num_rows = fewer.q_view.shape[0] = rows;
    check_faulty(fewer, first_rows(one, all, rows), "rows " + std::to_string(rows));
  }
}

TEST_CASE("rows that no sequence covers are empty, and a negative q_len is none") {
  if (!has_gpu()) return;
  auto engine = random_engine(7304);
  CAPTURE(seed());
  AttendCase one = make_case({{0, 40}, {4, 100}, {2, 50}}, engine);
  Outputs expected = one.run_cpu();
  {
    AttendCase negative = one;
    for (const int32_t wrong : {-1, kMin}) {
      negative.q_lens[0] = wrong;
      check_faulty(negative, expected, "q_len " + std::to_string(wrong));
    }
  }
  one.num_rows = one.q_view.shape[0] = 11;
  one.q.resize(view_bytes(one.q_view), std::byte{0xFF});
  expected.out.resize(11 * 4 * 64 * 4, std::byte{0});
  expected.lse.resize(11 * 4, -INFINITY);
  for (const int32_t splits : {0, 1, 4}) {
    one.params.num_splits = splits;
    one.compare(one.run_cuda(), expected, "uncovered rows");
  }
}

TEST_CASE("a mask that does not fit hides all keys of its sequence, and is counted") {
  if (!has_gpu()) return;
  auto engine = random_engine(7305);
  CAPTURE(seed());
  AttendCase one = make_case({{4, 100}, {2, 50}, {3, 33}}, engine);
  one.set_random_mask(engine);
  AttendCase hidden = one;
  for (int64_t byte = hidden.mask_offsets[1]; byte < hidden.mask_offsets[2]; ++byte)
    hidden.mask[static_cast<size_t>(byte)] = 0;
  const Outputs expected = hidden.run_cpu();
  const auto size = static_cast<int64_t>(one.mask.size());
  for (const int64_t wrong : {int64_t{-1}, size - 12, size, std::numeric_limits<int64_t>::max(),
                              std::numeric_limits<int64_t>::min()}) {
    one.mask_offsets[1] = wrong;
    check_faulty(one, expected, "mask offset " + std::to_string(wrong));
  }
}

TEST_CASE("entries left of the window are never read") {
  if (!has_gpu()) return;
  auto engine = random_engine(7306);
  CAPTURE(seed());
  for (const int32_t splits : {0, 1, 3}) {
    AttendCase one = make_case({{3, 5000}}, engine);
    one.params.window_left = 20;
    one.params.num_splits = splits;
    // The first row sees keys from 4997 - 20 on.
    for (size_t i = 0; i < (4997 - 20) / 16; ++i) one.table[i] = i % 2 == 0 ? -7 : kMax;
    one.check("window");
  }
}

template <typename T>
void make_wild(std::vector<T>& values, std::mt19937_64& engine) {
  for (T& value : values) {
    const auto random = static_cast<T>(engine());
    if (engine() % 8 == 0) value = random;
    if (engine() % 16 == 0) value = static_cast<T>(random % 100);
    if (engine() % 32 == 0) value = static_cast<T>(-(random % 3));
    if (engine() % 32 == 0) value = std::numeric_limits<T>::max();
    if (engine() % 32 == 0) value = std::numeric_limits<T>::min();
  }
}

double fuzz_seconds() {
  const char* text = std::getenv("LARDER_GPU_FUZZ_SECONDS");
  return text == nullptr ? 2.0 : std::atof(text);
}

AttendCase wild_case(const std::vector<Lengths>& lengths, std::mt19937_64& engine) {
  const auto any_format = [&] { return static_cast<KvFormat>(engine() % 5); };
  switch (engine() % 3) {
    case 0:
      return {mla_geometry(1, 16, static_cast<MlaRow>(1 + engine() % 4)), 8, lengths, engine};
    case 1:
      return {{1, 2, 16, 64, 32, any_format(), any_format()}, 4, lengths, engine};
    default:
      const KvFormat format = any_format();
      return {{1, 2, 16, 64, 64, format, format}, 4, lengths, engine};
  }
}

TEST_CASE("wild tables touch nothing outside") {
  if (!has_gpu()) return;
  auto engine = random_engine(7308);
  CAPTURE(seed());
  const auto start = std::chrono::steady_clock::now();
  int rounds = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
         fuzz_seconds()) {
    ++rounds;
    std::vector<Lengths> lengths;
    for (size_t s = 1 + engine() % 20; s-- > 0;)
      lengths.push_back({static_cast<int32_t>(engine() % 5), static_cast<int32_t>(engine() % 200)});
    AttendCase one = wild_case(lengths, engine);
    if (engine() % 2 == 0) one.set_random_mask(engine);
    if (engine() % 4 == 0) one.set_alibi(engine);
    one.params.deterministic = engine() % 2 == 0;
    if (engine() % 2 == 0) one.params.shared_prefix_tokens = kFindSharedPrefix;
    if (engine() % 2 == 0) one.params.window_left = static_cast<int32_t>(engine() % 300);
    one.params.num_splits = static_cast<int32_t>(engine() % 5);
    make_wild(one.q_lens, engine);
    make_wild(one.seq_lens, engine);
    make_wild(one.table, engine);
    make_wild(one.mask_offsets, engine);
    one.run_cuda();  // reads all guards
    const cudaError_t error = cudaDeviceSynchronize();
    REQUIRE_MESSAGE(error == cudaSuccess, cudaGetErrorString(error) << " at " << one.describe());
  }
  MESSAGE(rounds << " rounds of wild tables");
}

}  // namespace
}  // namespace larder::test
