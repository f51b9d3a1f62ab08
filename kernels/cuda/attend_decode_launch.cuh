// The launch of tuned attention, and the instances that other files hold.
#pragma once

#include "kernels/cuda/attend_decode_kernel.cuh"
#include "kernels/cuda/launch.h"

namespace larder::kernels::cuda {

// What a device can hold; the same for every call on it.
struct DecodeDevice {
  int num_multiprocessors = 0;
  int shared_bytes = 0;  // dynamic, of a CTA
};

// What the host must know of an instance to lay out a call.
struct DecodeInstance {
  int columns;
  int warps;
  int shared_bytes;
  Status (*launch)(const DecodeCall& call, const DecodeInstance& instance, int num_ctas,
                   cudaStream_t stream);
};

template <typename Shape>
Status launch_instance(const DecodeCall& call, const DecodeInstance& instance, int num_ctas,
                       cudaStream_t stream) {
  if (Status s = to_status(
          "attend_decode_kernel",
          cudaFuncSetAttribute(attend_decode_kernel<Shape>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, instance.shared_bytes));
      !s.ok())
    return s;
  return launch("attend_decode_kernel", attend_decode_kernel<Shape>, num_ctas, 32 * instance.warps,
                instance.shared_bytes, call, stream, true);
}

// As many warps as memory and registers allow, evenly over four schedulers.
template <typename Shape>
DecodeInstance instance_of(const DecodeDevice& device) {
  constexpr int kWarpBytes = Shape::kRingBytes + Shape::kSlotBytes;
  constexpr int kStaticBytes =
      static_cast<int>(sizeof(PlanShared) + 2 * kMaxDecodeWarps * sizeof(PieceNote) +
                       sizeof(PieceWalk) + sizeof(CtaPlan) + 2 * sizeof(MergeJob) +
                       kMaxDecodeWarps * sizeof(WarpPlaces)) +
      1024;
  const int fitting = (device.shared_bytes - kStaticBytes) / kWarpBytes;
  const int warps = std::min(fitting >= 4 ? fitting / 4 * 4 : fitting, Shape::kWarps);
  return {Shape::kColumns, warps, warps * kWarpBytes, launch_instance<Shape>};
}

// Of a format: `columns` wanted at once is a wish. warps 0: the device cannot hold it.
DecodeInstance nvfp4_instance(const DecodeDevice& device, int dim, int columns);
DecodeInstance fp8_instance(const DecodeDevice& device, int dim, int columns);
DecodeInstance bf16_instance(const DecodeDevice& device, int dim, int columns);
DecodeInstance fp16_instance(const DecodeDevice& device, int dim, int columns);

// Sums of d256 fill the registers with one column tile.
template <template <int> typename Rows>
DecodeInstance choose_instance(const DecodeDevice& device, int dim, int columns) {
  const bool is_wide = columns > 8;
  switch (dim) {
    case 64:
      return is_wide ? instance_of<DecodeShape<Rows<64>, 2>>(device)
                     : instance_of<DecodeShape<Rows<64>, 1>>(device);
    case 128:
      return is_wide ? instance_of<DecodeShape<Rows<128>, 2>>(device)
                     : instance_of<DecodeShape<Rows<128>, 1>>(device);
    default:
      return instance_of<DecodeShape<Rows<256>, 1>>(device);
  }
}

}  // namespace larder::kernels::cuda
