#include "client/examples/gpu_runner.h"

#include <cstdio>
#include <optional>
#include <vector>

#include "client/examples/gpu_layer_math.h"
#include "client/examples/gpu_memory.h"
#include "client/examples/gpu_products.h"
#include "client/examples/gpu_step.h"
#include "client/examples/gpu_weights.h"
#include "client/examples/layer_math.h"

namespace larder::examples {
namespace {

class GpuRunner final : public ModelRunner {
 public:
  // On the thread's current device. Throws GpuError.
  GpuRunner(const Model& model, Pool& pool, bool graphs)
      : ModelRunner(model, pool),
        uses_graphs_(graphs),
        weights_(upload_weights(model)),
        products_(stream_.get()),
        step_(model.config()) {}

  std::string place() const override { return pool().device(); }
  Result<Matrix> forward(Batch& batch, std::span<const int32_t> logit_rows,
                         AttentionDump* dump) override;

 private:
  Status run(const StepShape& shape, AttentionDump* dump);
  bool capture(const StepShape& shape);
  std::string try_capture(const StepShape& shape);
  Status enqueue(const StepShape& shape, AttentionDump* dump);
  Status enqueue_attention(int32_t layer_index, const StepShape& shape, AttentionDump* dump);
  void enqueue_mlp(const GpuLayerWeights& layer, int64_t num_rows);
  void dump_rows(int32_t layer_index, int64_t num_rows, AttentionDump& dump);

  HeadCounts heads() const {
    const ModelConfig& config = model().config();
    return {config.num_q_heads, config.num_kv_heads, config.head_dim};
  }

  bool uses_graphs_;
  GpuStream stream_;
  const GpuWeights weights_;
  GpuProducts products_;
  GpuStep step_;
  GpuGraph graph_;                           // of passes of graph_shape_
  StepShape graph_shape_;                    // where there is a graph
  std::optional<StepShape> launched_shape_;  // of the last pass that was launched by kernels
};

Result<Matrix> GpuRunner::forward(Batch& batch, std::span<const int32_t> logit_rows,
                                  AttentionDump* dump) try {
  for (const int32_t token : batch.tokens())
    LARDER_CHECK(token >= 0 && token < kByteVocabulary, token);
  const StepShape shape = step_shape(batch, logit_rows);
  if (step_.reserve(shape)) graph_.reset();
  step_.upload(batch, logit_rows, shape, stream_.get());
  if (Status status = run(shape, dump); !status.ok()) return status;
  Matrix logits(shape.num_logits, kByteVocabulary);
  const size_t size_bytes = static_cast<size_t>(logits.size()) * sizeof(float);
  check_cuda(cudaMemcpyAsync(logits.data(), step_.logits.data(), size_bytes, cudaMemcpyDeviceToHost,
                             stream_.get()),
             "cudaMemcpyAsync(" + std::to_string(size_bytes) + " bytes of logits)");
  stream_.wait();
  return logits;
} catch (const GpuError& error) {
  return error.status();
}

// The first pass of a shape is launched by kernels, which gives the pool's calls their workspace
// and loads the kernels; the second is captured.
Status GpuRunner::run(const StepShape& shape, AttentionDump* dump) {
  if (!uses_graphs_ || dump != nullptr || shape.num_rows != shape.num_seqs)
    return enqueue(shape, dump);
  const bool has_graph = graph_ != nullptr && graph_shape_ == shape;
  if (has_graph || (launched_shape_ == shape && capture(shape))) {
    check_cuda(cudaGraphLaunch(graph_.get(), stream_.get()), "cudaGraphLaunch");
    return {};
  }
  launched_shape_ = shape;
  return enqueue(shape, dump);
}

bool GpuRunner::capture(const StepShape& shape) {
  graph_.reset();
  const std::string refusal = try_capture(shape);
  if (refusal.empty()) {
    graph_shape_ = shape;
    return true;
  }
  uses_graphs_ = false;
  std::fprintf(stderr, "larder-generate: no CUDA graph, kernels are launched one by one: %s\n",
               refusal.c_str());
  return false;
}

// What keeps the pass from being a graph; empty: it is graph_.
std::string GpuRunner::try_capture(const StepShape& shape) try {
  check_cuda(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal),
             "cudaStreamBeginCapture");
  std::string refusal;
  try {
    if (Status status = enqueue(shape, nullptr); !status.ok()) refusal = status.to_string();
  } catch (const GpuError& error) {
    refusal = error.what();
  }
  // Also after a refusal: the stream is of use again then.
  cudaGraph_t captured = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream_.get(), &captured);
  const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> owner(captured, cudaGraphDestroy);
  if (!refusal.empty()) {
    (void)cudaGetLastError();
    return refusal;
  }
  check_cuda(ended, "cudaStreamEndCapture");
  cudaGraphExec_t graph = nullptr;
  check_cuda(cudaGraphInstantiate(&graph, captured, 0), "cudaGraphInstantiate");
  graph_.reset(graph);
  return {};
} catch (const GpuError& error) {
  return error.what();
}

Status GpuRunner::enqueue(const StepShape& shape, AttentionDump* dump) {
  const ModelConfig& config = model().config();
  const int32_t hidden = config.hidden_size;
  const StepTables tables = step_.tables(shape);
  gpu_embed(weights_.embedding.data(), tables.tokens, step_.x.data(), shape.num_rows, hidden,
            stream_.get());
  for (int32_t index = 0; index < config.num_layers; ++index) {
    if (Status status = enqueue_attention(index, shape, dump); !status.ok()) return status;
    enqueue_mlp(weights_.layers[static_cast<size_t>(index)], shape.num_rows);
  }
  gpu_rms_norm(step_.x.data(), tables.logit_rows, weights_.final_norm.data(),
               config.rms_norm_epsilon, step_.normed.data(), shape.num_logits, hidden,
               stream_.get());
  products_.linear(step_.normed.data(), weights_.logits(), step_.logits.data(), shape.num_logits,
                   hidden, kByteVocabulary);
  return {};
}

// x += attention(norm(x)), K and V of the rows into the pool.
Status GpuRunner::enqueue_attention(int32_t layer_index, const StepShape& shape,
                                    AttentionDump* dump) {
  const ModelConfig& config = model().config();
  const GpuLayerWeights& layer = weights_.layers[static_cast<size_t>(layer_index)];
  const StepTables tables = step_.tables(shape);
  const int64_t rows = shape.num_rows;
  const int32_t hidden = config.hidden_size;
  const HeadCounts counts = heads();
  gpu_rms_norm(step_.x.data(), nullptr, layer.attention_norm.data(), config.rms_norm_epsilon,
               step_.normed.data(), rows, hidden, stream_.get());
  products_.linear(step_.normed.data(), layer.qkv.data(), step_.qkv.data(), rows, hidden,
                   counts.width());
  gpu_rotate_and_round(step_.qkv.data(), tables.positions, weights_.frequencies.data(),
                       step_.key_bits.data(), step_.value_bits.data(), counts, rows, stream_.get());
  if (dump != nullptr) dump_rows(layer_index, rows, *dump);

  const auto kv_view = [&](const DeviceArray<uint16_t>& bits) {
    return dense_tensor(bits.data(), Dtype::kBf16, rows, counts.kv, counts.dim);
  };
  if (Status status =
          pool().append_in_stream(layer_index, kv_view(step_.key_bits), kv_view(step_.value_bits),
                                  tables.slots, rows, stream_.get());
      !status.ok())
    return status;

  DeviceAttendBatch batch;
  batch.q = dense_tensor(step_.qkv.data(), Dtype::kFp32, rows, counts.query, counts.dim);
  batch.q.strides[0] = counts.width();  // keys and values follow in each row
  batch.out = dense_tensor(step_.attended.data(), Dtype::kFp32, rows, counts.query, counts.dim);
  batch.q_lens = tables.q_lens;
  batch.seq_lens = tables.seq_lens;
  batch.block_table = tables.block_table;
  batch.num_seqs = shape.num_seqs;
  batch.block_table_stride = shape.table_stride;
  if (Status status = pool().attend_in_stream(layer_index, batch, {}, stream_.get()); !status.ok())
    return status;
  products_.linear(step_.attended.data(), layer.attention_output.data(), step_.x.data(), rows,
                   int64_t{counts.query} * counts.dim, hidden, true);
  return {};
}

// x += mlp(norm(x)).
void GpuRunner::enqueue_mlp(const GpuLayerWeights& layer, int64_t num_rows) {
  const ModelConfig& config = model().config();
  const int32_t hidden = config.hidden_size;
  const int32_t width = config.intermediate_size;
  gpu_rms_norm(step_.x.data(), nullptr, layer.mlp_norm.data(), config.rms_norm_epsilon,
               step_.normed.data(), num_rows, hidden, stream_.get());
  products_.linear(step_.normed.data(), layer.gate_up.data(), step_.gate_up.data(), num_rows,
                   hidden, 2 * int64_t{width});
  gpu_swiglu(step_.gate_up.data(), step_.gated.data(), num_rows, width, stream_.get());
  products_.linear(step_.gated.data(), layer.down.data(), step_.x.data(), num_rows, width, hidden,
                   true);
}

void GpuRunner::dump_rows(int32_t layer_index, int64_t num_rows, AttentionDump& dump) {
  const HeadCounts counts = heads();
  const auto read = [&](void* to, const void* from, size_t size_bytes) {
    check_cuda(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToHost, stream_.get()),
               "cudaMemcpyAsync(" + std::to_string(size_bytes) + " bytes of a dump)");
    stream_.wait();
  };
  std::vector<uint16_t> keys(static_cast<size_t>(num_rows * counts.kv * counts.dim));
  read(keys.data(), step_.key_bits.data(), keys.size() * sizeof(uint16_t));
  if (dump.keys_alone()) return dump.add(layer_index, {}, keys, {});
  std::vector<uint16_t> values(keys.size());
  read(values.data(), step_.value_bits.data(), values.size() * sizeof(uint16_t));
  // Queries come first in each row.
  Matrix qkv(num_rows, counts.width());
  read(qkv.data(), step_.qkv.data(), static_cast<size_t>(qkv.size()) * sizeof(float));
  const Matrix queries = qkv.leftCols(int64_t{counts.query} * counts.dim);
  dump.add(layer_index, round_to_bf16(queries), keys, values);
}

}  // namespace

Result<std::unique_ptr<ModelRunner>> make_gpu_runner(const Model& model, Pool& pool,
                                                     bool graphs) try {
  use_device(pool.device());
  return std::unique_ptr<ModelRunner>(std::make_unique<GpuRunner>(model, pool, graphs));
} catch (const GpuError& error) {
  return error.status();
}

}  // namespace larder::examples
