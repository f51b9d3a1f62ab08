#include "kernels/cuda/attend_decode_launch.cuh"

namespace larder::kernels::cuda {

DecodeInstance bf16_instance(const DecodeDevice& device, int dim, int columns) {
  return choose_instance<Bf16Rows>(device, dim, columns);
}

}  // namespace larder::kernels::cuda
