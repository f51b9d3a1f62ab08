// Every op through DeviceCalls against the CPU row, with tensors in each kind of memory.
#include <functional>

#include "tests/kernels/cuda/device_calls_support.h"

namespace larder::test {
namespace {

using namespace kernels;

// Runs a case for each kind of memory.
void everywhere(const std::function<void(DeviceCalls&, Where)>& body) {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  for (const Where where : kEverywhere) {
    CAPTURE(name(where));
    body(*calls, where);
  }
}

constexpr AttentionGeometry kNvfp4 = {1, 2, 16, 64, 32, KvFormat::kNvfp4, KvFormat::kFp8E4m3};

TEST_CASE("append writes the CPU's bytes, from strided rows, and the last of equal slots stays") {
  everywhere([](DeviceCalls& calls, Where where) {
    std::mt19937_64 engine = random_engine(201);
    Pool pool(kNvfp4, 4, std::byte{0xFF}, 7);
    DevicePool device(pool);
    // K and V in one tensor, 2 * 64 and 2 * 32 elements of each row, with a gap.
    const int64_t stride = 200;
    const std::vector<float> values = normal_values(engine, 20 * stride);
    Placed kv(values, where, calls);
    std::vector<int64_t> slots = {63, 5, 17, 5, -1, 0, 5, 40, -3, 17, 18, 19};
    AppendParams params;
    params.slots = slots.data();
    params.num_slots = static_cast<int64_t>(slots.size());
    params.k = {kv.data(), Dtype::kFp32, {20, 2, 64}, {stride, 64, 1}};
    params.v = {kv.data<float>() + 128, Dtype::kFp32, {20, 2, 32}, {stride, 1, 2}};
    params.layer = device.layer;
    CHECK_OK(calls.append(params));
    std::fill(slots.begin(), slots.end(), 1);  // tables have been copied
    CHECK_OK(calls.wait());

    slots = {63, 5, 17, 5, -1, 0, 5, 40, -3, 17, 18, 19};
    std::vector<float> on_host = values;
    params.k.data = on_host.data();
    params.v.data = on_host.data() + 128;
    params.layer = pool.layer();
    CHECK_OK(run_append(params));
    check_same("pool", device.memory.read(), pool.bytes());
  });
}

TEST_CASE("gather gives the CPU's values, and rows of no token and gaps keep their bytes") {
  everywhere([](DeviceCalls& calls, Where where) {
    std::mt19937_64 engine = random_engine(202);
    Pool pool(kNvfp4, 6, std::byte{0xFF}, 3);
    fill(pool, engine);
    DevicePool device(pool);
    const std::vector<float> before = normal_values(engine, 60 * 300);
    const std::vector<int32_t> table = {5, 0, -1, 99, 3, 99, -1};  // the last row is cut short
    const std::vector<int32_t> seq_lens = {20, 3};
    const std::vector<int64_t> slots = {-1, 8, -1, 95, 0, -2, 33, -1};
    for (const int mode : {0, 1, 2}) {
      CAPTURE(mode);
      GatherParams params;
      params.k_out = {nullptr, Dtype::kFp32, {60, 2, 64}, {300, 70, 1}};
      params.v_out = {nullptr, Dtype::kFp32, {60, 2, 32}, {300, 40, 1}};
      if (mode == 2) {
        params.slots = slots.data();
        params.num_slots = static_cast<int64_t>(slots.size());
      } else {
        params.block_table = table.data();
        params.block_table_stride = 4;
        params.seq_lens = seq_lens.data();
        params.num_seqs = 2;
        params.rows_per_sequence = mode == 1 ? 25 : 0;
      }
      std::vector<float> expected = before;
      params.layer = pool.layer();
      params.k_out.data = expected.data();
      params.v_out.data = expected.data() + 150;
      CHECK_OK(run_gather(params));
      Placed out(before, where, calls);
      params.layer = device.layer;
      params.k_out.data = out.data();
      params.v_out.data = out.data<float>() + 150;
      CHECK_OK(calls.gather(params));
      check_same("gathered", out.read<float>(), expected);
    }
  });
}

TEST_CASE("attend gives the CPU's result with a mask, sinks, strided outputs and a long table") {
  everywhere([](DeviceCalls& calls, Where where) {
    std::mt19937_64 engine = random_engine(203);
    Pool pool({1, 2, 16, 64, 64, KvFormat::kBf16, KvFormat::kBf16}, 6);
    fill(pool, engine);
    DevicePool device(pool);
    const std::vector<int32_t> q_lens = {2, 1};
    const std::vector<int32_t> seq_lens = {35, 17};
    const std::vector<int32_t> table = {5, 0, 2, -1, -1, 3, 4};
    std::vector<uint8_t> mask(12);
    for (uint8_t& byte : mask) byte = static_cast<uint8_t>(engine() | 1);
    const std::vector<int64_t> mask_offsets = {0, 9};
    const std::vector<float> q_values = normal_values(engine, 3 * 4 * 64);
    const std::vector<float> sink_values = normal_values(engine, 4);
    const std::vector<float> nothing(3 * 400, NAN);
    const std::vector<float> no_lse(12, NAN);
    const auto run = [&](Placed& q, Placed& out, Placed& lse, Placed& sinks, Placed& bits,
                         const LayerView& layer, const auto& call) {
      AttendParams params;
      params.layer = layer;
      params.q = dense_tensor(q.data(), Dtype::kFp32, 3, 4, 64);
      params.output.out = {out.data(), Dtype::kFp32, {3, 4, 64}, {400, 90, 1}};
      params.output.lse = lse.data<float>();
      params.sinks = sinks.data<float>();
      params.mask = bits.data<uint8_t>();
      params.mask_bytes = 12;
      params.mask_offsets = mask_offsets.data();
      params.q_lens = q_lens.data();
      params.seq_lens = seq_lens.data();
      params.block_table = table.data();
      params.block_table_stride = 5;
      params.num_seqs = 2;
      params.scale = 0.125f;
      CHECK_OK(call(params));
    };
    const auto results = [&](Where place, const LayerView& layer, const auto& call) {
      Placed q(q_values, place, calls), sinks(sink_values, place, calls), bits(mask, place, calls);
      Placed out(nothing, place, calls), lse(no_lse, place, calls);
      run(q, out, lse, sinks, bits, layer, call);
      return std::pair(out.read<float>(), lse.read<float>());
    };
    const auto expected = results(Where::kPageable, pool.layer(),
                                  [](const AttendParams& params) { return run_attend(params); });
    const auto got = results(where, device.layer,
                             [&](const AttendParams& params) { return calls.attend(params); });
    check_near("out", got.first, expected.first);
    check_near("lse", got.second, expected.second);
  });
}

TEST_CASE("sparse_mla gives the CPU's result") {
  everywhere([](DeviceCalls& calls, Where where) {
    std::mt19937_64 engine = random_engine(204);
    Pool pool(mla_geometry(1, 16, MlaRow::kBf16), 4);
    fill(pool, engine);
    DevicePool device(pool);
    const std::vector<float> q_values = normal_values(engine, 2 * 3 * 576, 0.3f);
    const std::vector<int32_t> index_values = {0, 63, -1, 7, 1000, 12, 12, 30};
    const std::vector<int32_t> lens = {4, 3};
    const auto run = [&](Where place, const LayerView& layer, const auto& call) {
      Placed q(q_values, place, calls), indices(index_values, place, calls);
      Placed out(std::vector<float>(2 * 3 * 512, NAN), place, calls);
      SparseMlaParams params;
      params.layer = layer;
      params.q = dense_tensor(q.data(), Dtype::kFp32, 2, 3, 576);
      params.output.out = dense_tensor(out.data(), Dtype::kFp32, 2, 3, 512);
      params.indices = indices.data<int32_t>();
      params.top_k = 4;
      params.topk_lens = lens.data();
      params.scale = 0.05f;
      CHECK_OK(call(params));
      return out.read<float>();
    };
    check_near(
        "out", run(where, device.layer, [&](const auto& p) { return calls.sparse_mla(p); }),
        run(Where::kPageable, pool.layer(), [](const auto& p) { return run_sparse_mla(p); }));
  });
}

TEST_CASE("merge and combine give the CPU's result, in place too") {
  everywhere([](DeviceCalls& calls, Where where) {
    std::mt19937_64 engine = random_engine(205);
    const std::vector<float> values = normal_values(engine, 2 * 5 * 3 * 32);
    const std::vector<float> lse_values = normal_values(engine, 2 * 5 * 3);
    const auto merged = [&](Where place, const auto& call) {
      Placed outs(values, place, calls), lses(lse_values, place, calls);
      const std::vector<TensorView> states = {
          dense_tensor(outs.data(), Dtype::kFp32, 5, 3, 32),
          dense_tensor(outs.data<float>() + 480, Dtype::kFp32, 5, 3, 32)};
      const std::vector<const float*> state_lses = {lses.data<float>(), lses.data<float>() + 15};
      MergeParams params;
      params.outs = states.data();
      params.lses = state_lses.data();
      params.num_states = 2;
      params.output.out = states[1];
      params.output.lse = lses.data<float>() + 15;
      CHECK_OK(call(params));
      std::vector<float> result = outs.read<float>();
      const std::vector<float> lse = lses.read<float>();
      result.insert(result.end(), lse.begin(), lse.end());
      return result;
    };
    check_near("merge", merged(where, [&](const auto& p) { return calls.merge(p); }),
               merged(Where::kPageable, [](const auto& p) { return run_merge(p); }));
    const auto combined = [&](Where place, const auto& call) {
      Placed out(values, place, calls), lses(lse_values, place, calls);
      CombineParams params;
      params.out = {out.data(), Dtype::kFp32, {5, 3, 32}, {128, 40, 1}};
      params.lses = lses.data<float>();
      params.num_ranks = 2;
      params.rank = 1;
      CHECK_OK(call(params));
      return out.read<float>();
    };
    check_near("combine", combined(where, [&](const auto& p) { return calls.combine(p); }),
               combined(Where::kPageable, [](const auto& p) { return run_combine(p); }));
  });
}

// 6 blocks of a pool to pages and back, with memory of the engine that has gaps.
TEST_CASE("convert moves the CPU's bytes both ways") {
  everywhere([](DeviceCalls& calls, Where where) {
    std::mt19937_64 engine = random_engine(206);
    Pool pool(kNvfp4, 8);
    fill(pool, engine);
    DevicePool device(pool);
    AttentionGeometry paged = kNvfp4;
    paged.block_tokens = 32;
    const std::vector<int32_t> blocks = {7, 0, 3, 2, 6, 1};
    const int64_t page_bytes = page_layout(paged).page_bytes;
    const std::vector<std::byte> before(static_cast<size_t>(3 * (page_bytes + 11)),
                                        std::byte{0xA7});
    const auto moved = [&](Where place, const LayerView& layer, bool to_pool,
                           const std::vector<std::byte>& foreign, const auto& call) {
      Placed memory(foreign, place, calls);
      ConvertParams params;
      params.layer = layer;
      params.blocks = blocks.data();
      params.num_blocks = 6;
      params.paged = dense_pages(memory.data(), paged, 3, PageOrder::kNhd);
      for (PagedRows* rows : {&params.paged.k_data, &params.paged.k_scale, &params.paged.v_data})
        rows->page_stride_bytes += 11;
      params.to_pool = to_pool;
      CHECK_OK(call(params));
      return memory.read();
    };
    const auto cpu = [](const ConvertParams& params) { return run_convert(params); };
    const auto gpu = [&](const ConvertParams& params) { return calls.convert(params); };
    const auto pages = moved(Where::kPageable, pool.layer(), false, before, cpu);
    check_same("pages", moved(where, device.layer, false, before, gpu), pages);
    std::vector<std::byte> fresh = pages;
    for (std::byte& byte : fresh) byte = static_cast<std::byte>(engine());
    moved(Where::kPageable, pool.layer(), true, fresh, cpu);
    check_same("read only", moved(where, device.layer, true, fresh, gpu), fresh);
    check_same("pool", device.memory.read(), pool.bytes());
  });
}

TEST_CASE("copy, scrub and checksum do what the CPU does") {
  everywhere([](DeviceCalls& calls, Where where) {
    std::mt19937_64 engine = random_engine(207);
    std::vector<std::byte> pool(3 * 5 * 1001);
    for (std::byte& byte : pool) byte = static_cast<std::byte>(engine());
    DeviceBytes device(pool);
    const BlocksView on_host = {pool.data(), 3 * 1001, 1001, 999, 3, 5};
    BlocksView on_device = on_host;
    on_device.base = device.data();
    const std::vector<int32_t> from = {4, 0}, to = {1, 3}, scrubbed = {2, 2, 4},
                               all = {0, 1, 2, 3, 4};
    CHECK_OK(run_copy({on_host, from.data(), to.data(), 2}));
    CHECK_OK(calls.copy({on_device, from.data(), to.data(), 2}));
    CHECK_OK(run_scrub({on_host, scrubbed.data(), 3}));
    CHECK_OK(calls.scrub({on_device, scrubbed.data(), 3}));
    check_same("pool", device.read(), pool);
    std::vector<uint64_t> expected(5);
    CHECK_OK(run_checksum({on_host, all.data(), 5, expected.data()}));
    Placed sums(std::vector<uint64_t>(5, 99), where, calls);
    CHECK_OK(calls.checksum({on_device, all.data(), 5, sums.data<uint64_t>()}));
    check_same("checksums", sums.read<uint64_t>(), expected);
  });
}

// 96 MiB: several parts of the pinned memory, the last not full.
TEST_CASE("pages larger than the pinned memory come back as they went") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  const AttentionGeometry g = {1, 8, 64, 128, 128, KvFormat::kBf16, KvFormat::kBf16};
  const PageLayout page = page_layout(g);
  const int64_t num_blocks = (96ll << 20) / page.page_bytes + 1;
  const auto size = static_cast<size_t>(num_blocks * page.page_bytes);
  const DeviceBytes pool(size);
  std::mt19937_64 engine = random_engine(208);
  std::vector<uint64_t> sent(size / 8), back(size / 8, 0);
  for (uint64_t& word : sent) word = engine();
  std::vector<int32_t> blocks;
  for (int64_t i = 0; i < num_blocks; ++i)
    blocks.push_back(static_cast<int32_t>(num_blocks - 1 - i));
  ConvertParams params;
  params.layer.base = pool.data();
  params.layer.block_stride_bytes = page.page_bytes;
  params.layer.num_blocks = num_blocks;
  params.layer.geometry = g;
  params.layer.page = page;
  params.blocks = blocks.data();
  params.num_blocks = num_blocks;
  params.to_pool = true;
  params.paged =
      dense_pages(reinterpret_cast<std::byte*>(sent.data()), g, num_blocks, PageOrder::kNhd);
  CHECK_OK(calls->convert(params));
  params.to_pool = false;
  params.paged =
      dense_pages(reinterpret_cast<std::byte*>(back.data()), g, num_blocks, PageOrder::kNhd);
  CHECK_OK(calls->convert(params));
  check_same("pages", back, sent);
}

TEST_CASE("a refused call writes nothing, and the next one works") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  Pool pool(kNvfp4, 2);
  std::mt19937_64 engine = random_engine(209);
  fill(pool, engine);
  DevicePool device(pool);
  std::vector<float> out(4 * 2 * 64, -5);
  std::vector<int64_t> slots = {0, 1, 2, 32};
  GatherParams params;
  params.layer = device.layer;
  params.k_out = dense_tensor(out.data(), Dtype::kFp32, 4, 2, 64);
  params.slots = slots.data();
  params.num_slots = 4;
  const Status past = calls->gather(params);
  CHECK(past.code() == ErrorCode::kInvalidArgument);
  CHECK(past.message().find("slots[3] is 32") != std::string::npos);
  const DeviceBytes device_slots(slots);
  params.slots = device_slots.data<int64_t>();
  const Status elsewhere = calls->gather(params);
  CHECK(elsewhere.code() == ErrorCode::kInvalidArgument);
  CHECK(elsewhere.message().find("slots lies in device memory") != std::string::npos);
  CHECK(out == std::vector<float>(out.size(), -5));
  CHECK(!calls->is_dead());
  slots[3] = 31;
  params.slots = slots.data();
  CHECK_OK(calls->gather(params));
  CHECK(out.back() != -5);
}

}  // namespace
}  // namespace larder::test
