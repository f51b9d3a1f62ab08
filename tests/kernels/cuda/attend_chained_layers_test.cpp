// Layers that share a plan, each with queries that the layer before gives: kernels that begin
// before others have ended must wait for these.
#include <deque>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_prefix_case.h"
#include "tests/kernels/cuda/attend_shared_plan_case.h"

namespace larder::test {
namespace {

constexpr int64_t kPrefixBlocks = 40;

class Chain {
 public:
  explicit Chain(std::vector<AttendCase>& layers) {
    for (AttendCase& layer : layers) {
      params_.push_back(layer.call(uploads_));
      const DeviceOutputs& output = outputs_.emplace_back(poisoned(layer.output()));
      output.point(params_.back().output);
      if (params_.size() > 1) params_.back().q.data = outputs_[params_.size() - 2].out.data();
    }
    const auto bytes = attend_row(kTunedAttend).workspace_bytes(params_[0]);
    workspace_.emplace_back(static_cast<size_t>(bytes));
  }

  void capture() {
    replayed_.capture([&] { enqueue(); });
  }
  // One layer after the other, each with a plan of its own.
  std::vector<SharingRun> run_apart() {
    poison();
    for (size_t layer = 0; layer < params_.size(); ++layer) {
      launch(layer, {});
      CHECK(cudaStreamSynchronize(replayed_.stream()) == cudaSuccess);
    }
    return read();
  }
  std::vector<SharingRun> run() {
    poison();
    replayed_.run([&] { enqueue(); });
    return read();
  }

 private:
  // Queries that are read too soon are NaN.
  void poison() {
    for (const DeviceOutputs& output : outputs_)
      CHECK(cudaMemset(output.out.data(), 0xFF, output.out.size()) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
  }
  void launch(size_t layer, const AttendPlan& plan) {
    kernels::Target target;
    target.backend = kernels::Backend::kCuda;
    target.stream = replayed_.stream();
    target.workspace = workspace_[0].data();
    target.workspace_bytes = static_cast<int64_t>(workspace_[0].size());
    target.faults = outputs_[layer].faults.data<kernels::CallFaults>();
    kernels::AttendParams params = params_[layer];
    params.plan = plan;
    check_ok(attend_row(kTunedAttend).launch(params, target));
  }
  void enqueue() {
    for (size_t layer = 0; layer < params_.size(); ++layer)
      launch(layer, {plan_.data(), layer == 0});
  }
  std::vector<SharingRun> read() const {
    std::vector<SharingRun> runs;
    for (const DeviceOutputs& output : outputs_)
      runs.push_back({output.read(), output.fault_count()});
    return runs;
  }

  Uploads uploads_;
  const DeviceBytes plan_ = plan_memory();
  std::deque<DeviceBytes> workspace_;
  std::deque<DeviceOutputs> outputs_;
  std::vector<kernels::AttendParams> params_;
  Replayed replayed_;
};

void check_chain(KvFormat format, int32_t dim, size_t num_seqs, int32_t told, int32_t longest,
                 std::mt19937_64& engine) {
  const auto prefix_tokens = static_cast<int32_t>(kPrefixBlocks * 16);
  std::vector<Lengths> lengths;
  for (size_t s = 0; s < num_seqs; ++s)
    lengths.push_back(
        {1, static_cast<int32_t>(draw(engine, 1, longest)) + (told == 0 ? 0 : prefix_tokens)});
  std::vector<AttendCase> layers;
  for (int layer = 0; layer < 6; ++layer) {
    AttendCase& one = layers.emplace_back(layer_of(format, dim, lengths, engine));
    if (told != 0) share_head(one, 0, num_seqs, kPrefixBlocks);
    one.params.shared_prefix_tokens = told;
    one.spec.dtype = Dtype::kBf16;
  }
  Chain chain(layers);
  const std::vector<SharingRun> expected = chain.run_apart();
  for (int round = 0; round < 6; ++round) {
    if (round == 3) chain.capture();
    const std::vector<SharingRun> got = chain.run();
    for (size_t layer = 0; layer < layers.size(); ++layer)
      check_same(got[layer], expected[layer],
                 std::string(name(format)) + ", dim " + std::to_string(dim) + ", " +
                     std::to_string(num_seqs) + " sequences, told " + std::to_string(told) +
                     ", round " + std::to_string(round) + ", layer " + std::to_string(layer));
  }
}

TEST_CASE("a layer's queries may be what the layer before gives") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7980);
  CAPTURE(seed());
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kFp16})
    for (const int32_t dim : {64, 128}) {
      check_chain(format, dim, 1, 0, 3000, engine);
      check_chain(format, dim, 40, 0, 500, engine);
      for (const int32_t told : {kFindSharedPrefix, static_cast<int32_t>(kPrefixBlocks * 16)})
        check_chain(format, dim, 12, told, 400, engine);
    }
}

}  // namespace
}  // namespace larder::test
