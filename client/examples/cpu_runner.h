// The forward pass on the CPU. The pool may be memory of any device, and its calls may run here or
// on request.
#pragma once

#include <memory>

#include "client/examples/model_runner.h"

namespace larder::examples {

std::unique_ptr<ModelRunner> make_cpu_runner(const Model& model, Pool& pool);

}  // namespace larder::examples
