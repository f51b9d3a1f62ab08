// Where a model runs: what one forward pass takes and gives, whatever does its arithmetic. Two do:
// the CPU (cpu_runner.h), for every pool, and a GPU (gpu_runner.h), for pools in its memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "client/examples/attention_dump.h"
#include "client/examples/batch.h"
#include "client/examples/model.h"
#include "larder/client.h"

namespace larder::examples {

// Used by one thread. Model and pool must outlive it. After a refusal only the destructor may be
// called.
class ModelRunner {
 public:
  ModelRunner(const Model& model, Pool& pool) : model_(model), pool_(pool) {}
  virtual ~ModelRunner() = default;
  ModelRunner(const ModelRunner&) = delete;
  ModelRunner& operator=(const ModelRunner&) = delete;

  const Model& model() const { return model_; }
  Pool& pool() const { return pool_; }
  // "cpu", or a GPU's UUID.
  virtual std::string place() const = 0;

  // Runs the batch through all layers: K and V of its rows are in the pool when it returns. Returns
  // the logits [logit_rows.size(), 256] of those rows. What attention takes in all layers
  // goes to `dump` too, where there is one.
  virtual Result<Matrix> forward(Batch& batch, std::span<const int32_t> logit_rows,
                                 AttentionDump* dump = nullptr) = 0;

 private:
  const Model& model_;
  Pool& pool_;
};

}  // namespace larder::examples
