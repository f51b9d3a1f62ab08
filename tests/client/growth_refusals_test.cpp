// Pools that grow: memory that is not there is an answer, and no fault.
#include <optional>

#include <doctest/doctest.h>

#include "tests/client/growing_pool.h"

namespace larder::test {
namespace {

TEST_CASE("blocks whose memory cannot be had are given back") {
  Growing f;
  std::optional<Pool> pool(f.open());
  auto allocating = f.allocate(*pool, {{2, 9}, {8, 3}});
  f.serve_segments(2, 1);  // is not there
  const auto release = f.peer.answer<protocol::Release>(protocol::Done{});
  CHECK(release.blocks == std::vector<protocol::Block>{{2, 9}, {8, 3}});
  check_status(allocating.get().status(), ErrorCode::kInternal, "no memory for 1");

  // Nor one that is no sealed memory of the extent's size.
  f.extents.emplace(2, create_host_segment("small", kExtent / 2));
  auto again = f.allocate(*pool, {{8, 4}});
  f.serve_segments(2, 1);
  f.peer.answer<protocol::Release>(protocol::Done{});
  CHECK_FALSE(again.get().ok());
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE("kernels in this process refuse ids whose memory is not there, and only those they use") {
  Growing f;
  std::optional<Pool> pool(f.open());
  std::vector<float> rows(2 * 64, 1.0f);
  const TensorView tensor = dense_tensor(rows.data(), Dtype::kFp32, 2, 1, 64);
  const std::vector<int64_t> slots = {5, 65};
  check_status(pool->append(0, tensor, tensor, slots), ErrorCode::kInvalidArgument,
               "slots[1] is 65, block 4");
  check_status(pool->read(0, tensor, tensor, slots), ErrorCode::kInvalidArgument,
               "slots[1] is 65, block 4");
  const std::vector<int64_t> good = {5, -1};
  CHECK(pool->append(0, tensor, tensor, good).ok());

  const std::vector<int32_t> blocks = {0, 12};
  std::vector<std::byte> bytes(2 * kBlock);
  const std::string named = "blocks[1] is 12:";
  check_status(pool->read_pages(0, blocks, bytes), ErrorCode::kInvalidArgument, named);
  check_status(pool->write_pages(0, blocks, bytes), ErrorCode::kInvalidArgument, named);
  check_status(pool->scrub(blocks), ErrorCode::kInvalidArgument, named);
  check_status(pool->checksum(blocks).status(), ErrorCode::kInvalidArgument, named);
  // Past the maximum is another mistake.
  const std::vector<int32_t> past = {16};
  check_status(pool->scrub(past), ErrorCode::kInvalidArgument, "16");

  AttendBatch batch;
  batch.q = batch.out = tensor;
  const std::vector<int32_t> q_lens = {2};
  const std::vector<int32_t> table = {0, 1, 15};
  batch.q_lens = q_lens;
  batch.block_table = table;
  batch.block_table_stride = 3;
  const std::vector<int32_t> short_lens = {32};
  batch.seq_lens = short_lens;
  CHECK(pool->attend(0, batch).ok());  // the third entry is not used
  const std::vector<int32_t> long_lens = {33};
  batch.seq_lens = long_lens;
  check_status(pool->attend(0, batch), ErrorCode::kInvalidArgument, "block_table[2] is 15");
  GatherBatch gather;
  std::vector<float> out(33 * 64);
  gather.k_out = gather.v_out = dense_tensor(out.data(), Dtype::kFp32, 33, 1, 64);
  gather.seq_lens = long_lens;
  gather.block_table = table;
  gather.block_table_stride = 3;
  check_status(pool->gather(0, gather), ErrorCode::kInvalidArgument, "block_table[2] is 15");
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE("a layout that no memory can have is refused, and the pool closed") {
  Growing f;
  for (const protocol::GroupLayout& layout :
       {protocol::GroupLayout{kBlock, kBlock, kBlock, 4, {}, 16, kExtent},
        protocol::GroupLayout{kBlock, kBlock, kBlock, 4, {kExtent}, 16, kExtent},
        protocol::GroupLayout{kBlock, kBlock, kBlock, 4, {kExtent, -kExtent}, 4, kExtent},
        protocol::GroupLayout{kBlock, kBlock, kBlock, 4, {kExtent + 1}, 4, kExtent},
        protocol::GroupLayout{kBlock, INT64_MAX, kBlock, 4, {kExtent}, 4, kExtent},
        protocol::GroupLayout{kBlock, kBlock, kBlock, 0, {kExtent}, 0, kExtent}}) {
    auto opening = beside([&] { return f.client.open_pool(growing_pool()); });
    f.peer.answer<protocol::OpenPool>(protocol::PoolOpened{kPool, true, {layout}});
    f.peer.answer<protocol::ClosePool>(protocol::Done{});
    check_status(opening.get().status(), ErrorCode::kInternal, "layout");
  }
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

}  // namespace
}  // namespace larder::test
