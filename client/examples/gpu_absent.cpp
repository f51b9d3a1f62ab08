// A build without CUDA or without cuBLAS: the pool's calls take host memory all the same.
#include "client/examples/cpu_runner.h"
#include "client/examples/gpu_runner.h"

namespace larder::examples {

Result<std::unique_ptr<ModelRunner>> make_gpu_runner(const Model& model, Pool& pool, bool) {
  return make_cpu_runner(model, pool);
}

}  // namespace larder::examples
