// The forward pass on the GPU whose memory the pool is, for pools that are used in process: weights
// and activations stay there, K and V go from its own memory into the pool, and of each pass only
// tokens, lengths and tables go up and logits come down. Plain float32 without TF32.
#pragma once

#include <memory>

#include "client/examples/model_runner.h"

namespace larder::examples {

// `graphs`: passes with one row for each sequence are captured in a CUDA graph the second time they
// have the same shapes, and replayed from then on. Where a capture is refused, one line on stderr
// says why, and passes are launched kernel by kernel.
//
// RESOURCE_EXHAUSTED when the weights do not fit the GPU, INTERNAL for what CUDA or cuBLAS report.
// In a build without CUDA or cuBLAS it is the CPU's runner.
Result<std::unique_ptr<ModelRunner>> make_gpu_runner(const Model& model, Pool& pool, bool graphs);

}  // namespace larder::examples
