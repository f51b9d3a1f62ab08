// Any values as slots, tables, lengths and block lists: nothing outside of what may be written
// changes, what is written is what the CPU writes, and every fault is counted. Runs for
// $LARDER_GPU_FUZZ_SECONDS, or 2.
#include <chrono>
#include <cstdlib>
#include <limits>
#include <set>

#include "tests/kernels/cuda/device_calls.h"

namespace larder::kernels {
namespace {

using test::AnyTensor;
using test::DeviceBytes;
using test::draw;
using test::pick;

constexpr int64_t kNumBlocks = 23;

// Mostly a value in range, else any, often one next to a power of two or to the range's ends.
template <typename T>
T wild(int64_t range, std::mt19937_64& engine) {
  if (draw(engine, 0, 2) != 0) return static_cast<T>(draw(engine, 0, range - 1));
  switch (draw(engine, 0, 3)) {
    case 0:
      return static_cast<T>(engine());
    case 1:
      return static_cast<T>((int64_t{1} << draw(engine, 0, 62)) + draw(engine, -1, 1));
    case 2:
      return static_cast<T>(range + draw(engine, -2, 2));
    default:
      return static_cast<T>(-draw(engine, 0, 3));
  }
}

// One pool with random bytes and rights, and a round of calls on it.
class Round {
 public:
  explicit Round(std::mt19937_64& engine)
      : engine_(engine),
        block_tokens_(pick(engine, {1, 3, 16, 33})),
        layer_({1, static_cast<int32_t>(draw(engine, 1, 3)), block_tokens_, 32, 16,
                KvFormat::kNvfp4, KvFormat::kFp8E4m3},
               kNumBlocks, engine),
        use_(kNumBlocks, draw(engine, 0, 3) != 0, engine) {
    for (std::byte& byte : layer_.pool.bytes()) byte = static_cast<std::byte>(engine());
    device_ = layer_.device();
  }

  void append() {
    const int64_t heads = layer_.pool.geometry().num_kv_heads;
    const int64_t rows = draw(engine_, 0, 60);
    AnyTensor k(Dtype::kFp32, rows, heads, 32, false, engine_);
    AnyTensor v(Dtype::kBf16, rows, heads, 16, false, engine_);
    k.fill(engine_);
    v.fill(engine_);
    std::vector<int64_t> slots, good;
    std::vector<int64_t> wrong;
    std::set<int64_t> taken;
    for (int64_t i = 0; i < rows; ++i) {
      int64_t slot = wild<int64_t>(kNumBlocks * block_tokens_, engine_);
      if (!taken.insert(slot).second) slot = -1;  // of two rows with one slot, either may stay
      const bool is_wrong = slot >= 0 && !use_.may(slot / block_tokens_, true);
      if (is_wrong) wrong.push_back(slot);
      slots.push_back(slot);
      good.push_back(is_wrong ? -1 : slot);
    }
    const DeviceBytes device_k(k.bytes), device_v(v.bytes), device_slots(slots);
    test::check_ok(
        run_append(test::append_of(device_, k.view(device_k.data()), v.view(device_v.data()),
                                   device_slots.data<int64_t>(), rows),
                   use_.target()));
    test::check_ok(
        run_append(test::append_of(layer_.host(), k.host(), v.host(), good.data(), rows)));
    check("append", wrong);
  }

  // Contiguous rows or windows of a table of anything: a row's slot, or -1, as in the header.
  void gather() {
    const int64_t heads = layer_.pool.geometry().num_kv_heads;
    const int64_t stride = draw(engine_, 0, 4);
    const int64_t window = draw(engine_, 0, 1) * draw(engine_, 1, 40);
    const int64_t rows = draw(engine_, 1, 120);
    const int64_t held = stride * block_tokens_;
    std::vector<int32_t> table, lens;
    std::vector<int64_t> wrong, slots(static_cast<size_t>(rows), -1);
    int64_t first = 0;
    const int64_t num_seqs = draw(engine_, 1, 20);
    for (int64_t s = 0; s < num_seqs; ++s) {
      lens.push_back(wild<int32_t>(held + 1, engine_));
      for (int64_t i = 0; i < stride; ++i) table.push_back(wild<int32_t>(kNumBlocks, engine_));
      if (window > 0) first = s * window;
      const int64_t in_table = std::clamp<int64_t>(lens.back(), 0, held);
      const int64_t in_window = window > 0 ? std::min(in_table, window) : in_table;
      const int64_t len = std::clamp<int64_t>(rows - first, 0, in_window);
      if (len != lens.back()) wrong.push_back(lens.back());
      for (int64_t i = 0; i < len; ++i) {
        const int64_t block = table[static_cast<size_t>(s * stride + i / block_tokens_)];
        if (use_.may(block, false))
          slots[static_cast<size_t>(first + i)] = block * block_tokens_ + i % block_tokens_;
        else if (i % block_tokens_ == 0)
          wrong.push_back(block);
      }
      first += in_window;
    }
    AnyTensor k(Dtype::kFp32, rows, heads, 32, false, engine_);
    AnyTensor v(Dtype::kBf16, rows, heads, 16, false, engine_);
    const DeviceBytes device_k(k.bytes), device_v(v.bytes);
    const DeviceBytes device_table(table), device_lens(lens);
    GatherParams params;
    params.layer = device_;
    params.k_out = k.view(device_k.data());
    params.v_out = v.view(device_v.data());
    params.block_table = device_table.data<int32_t>();
    params.seq_lens = device_lens.data<int32_t>();
    params.num_seqs = static_cast<int64_t>(lens.size());
    params.block_table_stride = stride;
    params.rows_per_sequence = window;
    test::check_ok(run_gather(params, use_.target()));
    GatherParams expected;
    expected.layer = layer_.host();
    expected.k_out = k.host();
    expected.v_out = v.host();
    expected.slots = slots.data();
    expected.num_slots = rows;
    test::check_ok(run_gather(expected));
    CHECK(test::differences(device_k.read(), k.bytes) == "");
    CHECK(test::differences(device_v.read(), v.bytes) == "");
    check("gather", wrong);
  }

  void copy() {
    std::vector<int32_t> from, to, good_from, good_to;
    std::vector<int64_t> wrong;
    std::set<int32_t> written, read;
    const int64_t entries = draw(engine_, 0, 30);
    for (int64_t i = 0; i < entries; ++i) {
      const auto source = wild<int32_t>(kNumBlocks, engine_);
      const auto target = wild<int32_t>(kNumBlocks, engine_);
      // A block that is both, or written twice, would hold what comes last.
      if (written.count(source) > 0 || read.count(target) > 0 || source == target) continue;
      if (!written.insert(target).second) continue;
      read.insert(source);
      from.push_back(source);
      to.push_back(target);
      if (!use_.may(source, false)) wrong.push_back(source);
      if (!use_.may(target, true)) wrong.push_back(target);
      if (!use_.may(source, false) || !use_.may(target, true)) continue;
      good_from.push_back(source);
      good_to.push_back(target);
    }
    const DeviceBytes device_from(from), device_to(to);
    test::check_ok(run_copy({view(device_.base), device_from.data<int32_t>(),
                             device_to.data<int32_t>(), static_cast<int64_t>(from.size())},
                            use_.target()));
    test::check_ok(run_copy({view(layer_.host().base), good_from.data(), good_to.data(),
                             static_cast<int64_t>(good_from.size())}));
    check("copy", wrong);
  }

  void scrub_and_checksum() {
    std::vector<int32_t> blocks, scrubbed;
    std::vector<int64_t> not_written, not_read;
    const int64_t entries = draw(engine_, 0, 30);
    for (int64_t i = 0; i < entries; ++i) {
      blocks.push_back(wild<int32_t>(kNumBlocks, engine_));
      if (use_.may(blocks.back(), true))
        scrubbed.push_back(blocks.back());
      else
        not_written.push_back(blocks.back());
      if (!use_.may(blocks.back(), false)) not_read.push_back(blocks.back());
    }
    const auto count = static_cast<int64_t>(blocks.size());
    std::vector<uint64_t> expected(blocks.size(), 0);
    for (size_t i = 0; i < blocks.size(); ++i)
      if (use_.may(blocks[i], false))
        test::check_ok(run_checksum({view(layer_.host().base), &blocks[i], 1, &expected[i]}));
    const DeviceBytes list(blocks), sums(blocks.size() * sizeof(uint64_t));
    test::check_ok(run_checksum(
        {view(device_.base), list.data<int32_t>(), count, sums.data<uint64_t>()}, use_.target()));
    CHECK(sums.read<uint64_t>() == expected);
    check("checksum", not_read);
    test::check_ok(run_scrub({view(device_.base), list.data<int32_t>(), count}, use_.target()));
    test::check_ok(run_scrub(
        {view(layer_.host().base), scrubbed.data(), static_cast<int64_t>(scrubbed.size())}));
    check("scrub", not_written);
  }

 private:
  BlocksView view(std::byte* base) const {
    const LayerView& layer = layer_.pool.layer();
    return {base, layer.block_stride_bytes, 0, layer.page.page_bytes, 1, kNumBlocks};
  }
  void check(std::string_view op, const std::vector<int64_t>& wrong) {
    CAPTURE(op);
    const std::string text = test::differences(layer_.read(), layer_.pool.bytes());
    CHECK_MESSAGE(text.empty(), text);
    use_.check(wrong);
  }

  std::mt19937_64& engine_;
  int32_t block_tokens_;
  test::TwinLayer layer_;
  test::PointOfUse use_;
  LayerView device_;
};

TEST_CASE("wild slots, tables, lengths and lists change nothing that may not be written") {
  if (!test::has_gpu()) return;
  const char* text = std::getenv("LARDER_GPU_FUZZ_SECONDS");
  const std::chrono::duration<double> time(text == nullptr ? 2 : std::atof(text));
  auto engine = test::random_engine(7501);
  CAPTURE(test::seed());
  const auto end = std::chrono::steady_clock::now() + time;
  int64_t rounds = 0;
  do {
    CAPTURE(rounds);
    Round round(engine);
    round.append();
    round.gather();
    round.copy();
    round.append();
    round.scrub_and_checksum();
    ++rounds;
  } while (std::chrono::steady_clock::now() < end);
  MESSAGE(rounds << " rounds");
}

}  // namespace
}  // namespace larder::kernels
