// Rows on their way from tensors to the warps that encode them: a ring of shared memory per warp,
// filled by asynchronous copies, so that several items are under way without taking registers.
#pragma once

#include "kernels/cuda/append_call.cuh"

namespace larder::kernels::cuda {

inline constexpr int kStages = 4;
inline constexpr int kUnitBytes = 16;
inline constexpr int kItemBytes = kWarp * static_cast<int>(sizeof(Words));  // of a warp

// 16 bytes, of which the first `bytes` (0 or 16) come from `from` and the rest are zeros.
__device__ inline void copy_async(uint32_t to_shared, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from),
               "r"(bytes));
}

// Lane l copies units l and l + 32 of the 64 of an item, side by side with its neighbours, and
// takes units 2l and 2l + 1: its group. Units 8 to 15 of every 16 are exchanged in pairs, so that
// neither way has bank conflicts.
//
// Items are copied and taken in turn from an even one on: kStages - 1 times copy at first, then
// wait, copy and take for each.
class Feed {
 public:
  // `row`: of the warp's first token. Items [begin, end) are wanted.
  __device__ Feed(const RowsCall& call, const RowsLayer& layer, uint8_t* ring, int64_t row,
                  int begin, int end)
      : call_(call), begin_(begin), next_(begin & ~1), end_(end), stage_(0) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    ring_ = static_cast<uint32_t>(__cvta_generic_to_shared(ring));
    to_ = ring_ + static_cast<uint32_t>(lane ^ (lane >> 3 & 1)) * kUnitBytes;
    const int group = lane >> 1;
    const int64_t own_row = row + (group >> call.groups_shift);
    const int64_t second_row = row + ((group + kWarp / 2) >> call.groups_shift);
    const int64_t unit =
        (group & ((1 << call.groups_shift) - 1)) * int64_t{sizeof(Words)} + (lane & 1) * kUnitBytes;
    for (int parity = 0; parity < 2; ++parity)
      sources_[parity] = layer.sources[parity] + own_row * call.row_stride_bytes[parity] + unit +
                         (begin >> 1) * call.step_source_bytes[parity];
    bytes_ = own_row < call.num_slots ? kUnitBytes : 0;  // the rest becomes zeros
    second_bytes_ = second_row < call.num_slots ? kUnitBytes : 0;
  }

  // Starts the copies of the next item, of this parity.
  template <int kParity>
  __device__ void copy_next() {
    if (next_ >= begin_ && next_ < end_) {
      copy_async(to_ + stage_, sources_[kParity], bytes_);
      copy_async(to_ + stage_ + kItemBytes / 2,
                 sources_[kParity] + call_.second_unit_bytes[kParity], second_bytes_);
    }
    sources_[kParity] += call_.step_source_bytes[kParity];
    asm volatile("cp.async.commit_group;");
    stage_ = (stage_ + kItemBytes) % (kStages * kItemBytes);
    ++next_;
  }

  // Until the oldest item is there, for all lanes.
  __device__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncwarp();
  }

  // The group of a lane in the oldest item; after wait() and the copy_next() that follows.
  __device__ Words take(int lane) const {
    const auto swap = static_cast<uint32_t>(lane >> 2 & 1);
    const uint32_t pair = ring_ + stage_ + static_cast<uint32_t>(lane) * sizeof(Words);
    Words words;
    read(pair + swap * kUnitBytes, words.at);
    read(pair + (swap ^ 1) * kUnitBytes, words.at + 4);
    return words;
  }

 private:
  static __device__ void read(uint32_t from, uint32_t* words /* [4] */) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
  }

  const RowsCall& call_;
  const uint8_t* sources_[2];  // this lane's first unit in the next item of each parity
  uint32_t bytes_;
  uint32_t second_bytes_;
  uint32_t ring_;
  uint32_t to_;
  int begin_;
  int next_;
  int end_;
  uint32_t stage_;  // byte offset of the stage that is filled next
};

}  // namespace larder::kernels::cuda
