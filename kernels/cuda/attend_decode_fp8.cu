#include "kernels/cuda/attend_decode_launch.cuh"

namespace larder::kernels::cuda {

DecodeInstance fp8_instance(const DecodeDevice& device, int dim, int columns) {
  return choose_instance<Fp8Rows>(device, dim, columns);
}

}  // namespace larder::kernels::cuda
