#include "kernels/cuda/attend_decode_launch.cuh"

namespace larder::kernels::cuda {

DecodeInstance nvfp4_instance(const DecodeDevice& device, int dim, int columns) {
  return choose_instance<Nvfp4Rows>(device, dim, columns);
}

}  // namespace larder::kernels::cuda
