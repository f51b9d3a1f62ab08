// Plans that calls with a shared prefix share: who shares it is decided once for all layers of a
// step.
#include <algorithm>
#include <deque>
#include <tuple>
#include <utility>

#include <doctest/doctest.h>

#include "kernels/cuda/attend_prefix.h"
#include "tests/kernels/cuda/attend_shared_plan_case.h"

namespace larder::test {
namespace {

constexpr int32_t kPrefixTokens = 576;  // a prefix that is found has 512 at least
constexpr int64_t kPrefixBlocks = kPrefixTokens / 16;

// Each sequence goes on after the prefix.
std::vector<Lengths> lengths_after_prefix(size_t count, int32_t q_len, int32_t longest,
                                          std::mt19937_64& engine) {
  std::vector<Lengths> lengths;
  for (size_t s = 0; s < count; ++s)
    lengths.push_back(
        {q_len, kPrefixTokens + q_len + static_cast<int32_t>(draw(engine, 0, longest))});
  return lengths;
}

// A prefix that is given is in all sequences; of those that are found there are two, from four
// sequences on.
AttendCase prefix_layer(KvFormat format, int32_t dim, const std::vector<Lengths>& lengths,
                        int32_t told, std::mt19937_64& engine) {
  AttendCase one = layer_of(format, dim, lengths, engine);
  const size_t count = lengths.size();
  const size_t middle = told == kFindSharedPrefix && count >= 4 ? count / 2 : count;
  share_head(one, 0, middle, kPrefixBlocks);
  share_head(one, middle, count, kPrefixBlocks);
  one.params.shared_prefix_tokens = told;
  return one;
}

bool uses_prefix(AttendCase& one) {
  Uploads uploads;
  return kernels::cuda::prefix_layout(one.call(uploads)).is_used;
}

AttendCase without_prefix(const AttendCase& one) {
  AttendCase ignoring = one;
  ignoring.params.shared_prefix_tokens = 0;
  return ignoring;
}

TEST_CASE("layers with a prefix, given or found, begin with the first one's plan") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7970);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t told : {kFindSharedPrefix, kPrefixTokens}) {
        const auto count = pick<size_t>(engine, {2, 5, 12});
        const auto q_len = pick<int32_t>(engine, {1, 2, 4});
        const auto lengths = lengths_after_prefix(count, q_len, 300, engine);
        AttendCase first = prefix_layer(format, dim, lengths, told, engine);
        AttendCase second = prefix_layer(format, dim, lengths, told, engine);
        // Other calls share a plan without it.
        const bool is_used = format != KvFormat::kBf16 && (format != KvFormat::kFp16 || dim < 256);
        CHECK(uses_prefix(first) == is_used);
        const std::string what = std::string(name(format)) + ", dim " + std::to_string(dim) + ", " +
                                 std::to_string(count) + " sequences, told " + std::to_string(told);
        check_results(second, check_layers(first, second, plan, what), what);
      }
}

TEST_CASE("options of calls that take a plan with a prefix are their own") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7971);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  for (const int32_t told : {kFindSharedPrefix, kPrefixTokens}) {
    const auto lengths = lengths_after_prefix(7, 2, 200, engine);
    AttendCase first = prefix_layer(KvFormat::kNvfp4, 128, lengths, told, engine);
    AttendCase second = prefix_layer(KvFormat::kNvfp4, 128, lengths, told, engine);
    second.params.soft_cap = 4.0f;
    second.set_transform(KeyTransform::kCentredRotated, engine);
    second.set_sinks(engine);
    check_results(second, check_layers(first, second, plan, "options"), "options");
  }
}

// The tables of the layers are alike where they share; this one's rows share nothing.
TEST_CASE("who shares a prefix is what the plan says") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7972);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  const auto lengths = lengths_after_prefix(6, 1, 200, engine);
  AttendCase first = prefix_layer(KvFormat::kNvfp4, 128, lengths, kFindSharedPrefix, engine);
  AttendCase other = layer_of(KvFormat::kNvfp4, 128, lengths, engine);
  other.params.shared_prefix_tokens = kFindSharedPrefix;
  const SharingRun expected = run_sharing(other, plan, Use::kNone);
  run_sharing(first, plan, Use::kMake);
  CHECK(bytes_of(run_sharing(other, plan, Use::kTake).outputs) != bytes_of(expected.outputs));
  check_same(run_sharing(other, plan, Use::kMake), expected, "made anew");
  check_same(run_sharing(other, plan, Use::kTake), expected, "taken");
}

TEST_CASE("calls with a prefix that find another plan read it for each sequence") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7973);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  for (const int32_t dim : {64, 128}) {
    const auto lengths = lengths_after_prefix(9, 2, 400, engine);
    AttendCase given = prefix_layer(KvFormat::kNvfp4, dim, lengths, kPrefixTokens, engine);
    AttendCase found = given, shorter = given;
    found.params.shared_prefix_tokens = kFindSharedPrefix;
    shorter.params.shared_prefix_tokens = kPrefixTokens - 64;
    AttendCase none = without_prefix(given);
    AttendCase not_causal = given;
    not_causal.params.causal = false;
    const SharingRun without = run_sharing(none, plan, Use::kNone);
    check_results(none, without.outputs, "no prefix");
    // Told of a prefix, a call deals tiles out as if there were one, whoever it finds.
    const DeviceBytes fresh = plan_memory();
    const SharingRun expected = run_sharing(given, fresh, Use::kTake);
    check_results(none, expected.outputs, "memory without a plan");
    check_same(run_sharing(found, fresh, Use::kTake), expected, "memory without a plan");
    for (AttendCase* maker : {&given, &found, &shorter, &none, &not_causal})
      for (AttendCase* taker : {&given, &found, &shorter, &none}) {
        if (maker == taker) continue;
        run_sharing(*maker, plan, Use::kMake);
        check_same(run_sharing(*taker, plan, Use::kTake), taker == &none ? without : expected,
                   "the plan of another prefix");
      }
    AttendCase deterministic = given;
    deterministic.params.deterministic = true;
    run_sharing(given, plan, Use::kMake);
    run_sharing(deterministic, plan, Use::kMake);
    check_same(run_sharing(given, plan, Use::kTake), expected, "a plan that could not be made");
  }
}

TEST_CASE("more sequences with a prefix than a plan has room for share none") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7974);
  CAPTURE(seed());
  for (const int64_t count : {9'000, 60'000}) {
    const DeviceBytes plan = plan_memory();
    std::vector<Lengths> lengths;
    for (int64_t s = 0; s < count; ++s)
      lengths.push_back({1, static_cast<int32_t>(draw(engine, 1, 3))});
    AttendCase one = layer_of(KvFormat::kNvfp4, 64, lengths, engine, 1, 1);
    one.params.shared_prefix_tokens = 256;
    REQUIRE(uses_prefix(one));
    const SharingRun expected = run_sharing(one, plan, Use::kNone);
    check_same(run_sharing(one, plan, Use::kMake), expected, "made");
    CHECK((plan.read<uint64_t>()[0] != 0) == (count == 9'000));
    check_same(run_sharing(one, plan, Use::kTake), expected, "taken");
  }
}

TEST_CASE("a plan with a prefix of other lengths reads nothing that the call could not read") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7975);
  CAPTURE(seed());
  const DeviceBytes plan = plan_memory();
  for (const int32_t told : {kFindSharedPrefix, kPrefixTokens}) {
    const auto lengths = lengths_after_prefix(4, 1, 2000, engine);
    AttendCase one = prefix_layer(KvFormat::kNvfp4, 128, lengths, told, engine);
    const SharingRun expected = run_sharing(one, plan, Use::kNone);
    AttendCase other = one;
    other.seq_lens = {1, one.seq_lens[1], 600, 0};
    other.q_lens = {0, 2, 1, 1};
    for (AttendCase* made_by : {&one, &other}) {
      run_sharing(*made_by, plan, Use::kMake);
      run_sharing(one, plan, Use::kTake);
      run_sharing(other, plan, Use::kTake);
    }
    run_sharing(one, plan, Use::kMake);
    check_same(run_sharing(one, plan, Use::kTake), expected, "made anew");
  }
}

// Steps of a model whose layers share a plan, in one stream and over one workspace. Lengths are
// copied on the device before each step, and nothing is waited for.
class Steps {
 public:
  // A step: q_lens and seq_lens.
  using StepLengths = std::pair<std::vector<int32_t>, std::vector<int32_t>>;

  Steps(std::vector<AttendCase>& layers, std::vector<StepLengths> steps)
      : layers_(layers), steps_(std::move(steps)) {
    for (AttendCase& layer : layers_) params_.push_back(layer.call(uploads_));
    const auto& row = attend_row(kTunedAttend);
    workspace_.emplace_back(static_cast<size_t>(row.workspace_bytes(params_[0])));
    for (const auto& [q_lens, seq_lens] : steps_) {
      step_q_lens_.emplace_back(q_lens);
      step_seq_lens_.emplace_back(seq_lens);
      for (AttendCase& layer : layers_) outputs_.emplace_back(poisoned(layer.output()));
    }
    // The layers' lengths are those of the first.
    for (kernels::AttendParams& params : params_) {
      params.q_lens = params_[0].q_lens;
      params.seq_lens = params_[0].seq_lens;
    }
  }

  void capture() {
    replayed_.capture([&] { enqueue(); });
  }
  void run() {
    for (const DeviceOutputs& outputs : outputs_) {
      CHECK(cudaMemset(outputs.out.data(), 0xFF, outputs.out.size()) == cudaSuccess);
      CHECK(cudaMemset(outputs.lse.data(), 0xFF, outputs.lse.size()) == cudaSuccess);
    }
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    replayed_.run([&] { enqueue(); });
    workspace_[0].check_guards();
    plan_.check_guards();
  }
  const DeviceOutputs& outputs(size_t step, size_t layer) const {
    return outputs_[step * layers_.size() + layer];
  }

 private:
  void enqueue() {
    kernels::Target target;
    target.backend = kernels::Backend::kCuda;
    target.stream = replayed_.stream();
    target.workspace = workspace_[0].data();
    target.workspace_bytes = static_cast<int64_t>(workspace_[0].size());
    for (size_t step = 0; step < steps_.size(); ++step) {
      copy(params_[0].q_lens, step_q_lens_[step]);
      copy(params_[0].seq_lens, step_seq_lens_[step]);
      for (size_t layer = 0; layer < layers_.size(); ++layer) {
        kernels::AttendParams params = params_[layer];
        outputs(step, layer).point(params.output);
        params.plan = {plan_.data(), layer == 0};
        target.faults = outputs(step, layer).faults.data<kernels::CallFaults>();
        check_ok(attend_row(kTunedAttend).launch(params, target));
      }
    }
  }
  void copy(const int32_t* to, const DeviceBytes& from) {
    CHECK(cudaMemcpyAsync(const_cast<int32_t*>(to), from.data(), from.size(),
                          cudaMemcpyDeviceToDevice, replayed_.stream()) == cudaSuccess);
  }

  std::vector<AttendCase>& layers_;
  std::vector<StepLengths> steps_;
  Uploads uploads_;
  const DeviceBytes plan_ = plan_memory();
  std::deque<DeviceBytes> workspace_, step_q_lens_, step_seq_lens_;
  std::deque<DeviceOutputs> outputs_;
  std::vector<kernels::AttendParams> params_;
  Replayed replayed_;
};

// The third one has sequences that are shorter than the prefix.
std::vector<Steps::StepLengths> changing_lengths(const std::vector<Lengths>& longest,
                                                 std::mt19937_64& engine) {
  std::vector<Steps::StepLengths> steps(4);
  for (size_t step = 0; step < steps.size(); ++step) {
    auto& [q_lens, seq_lens] = steps[step];
    for (const Lengths& one : longest) {
      q_lens.push_back(one.q_len);
      const int64_t least = step == 2 ? 1 : kPrefixTokens + 3;
      seq_lens.push_back(static_cast<int32_t>(draw(engine, least, one.seq_len)));
    }
    std::shuffle(q_lens.begin(), q_lens.end(), engine);
  }
  return steps;
}

TEST_CASE("steps of other lengths each, in a stream and in a graph, have plans of their own") {
  if (!has_gpu() || !has_attend_row(kTunedAttend)) return;
  auto engine = random_engine(7976);
  CAPTURE(seed());
  const DeviceBytes no_plan = plan_memory();
  for (const int32_t told : {0, kFindSharedPrefix, kPrefixTokens}) {
    std::vector<Lengths> longest = lengths_after_prefix(9, 3, 1500, engine);
    for (size_t s = 0; s < longest.size(); ++s) longest[s].q_len = 1 + static_cast<int32_t>(s % 3);
    std::vector<AttendCase> layers;
    for (int layer = 0; layer < 3; ++layer)
      layers.push_back(prefix_layer(KvFormat::kNvfp4, 128, longest, told, engine));
    const auto lengths = changing_lengths(longest, engine);
    Steps steps(layers, lengths);
    for (int round = 0; round < 4; ++round) {
      if (round == 2) steps.capture();
      steps.run();
      for (size_t step = 0; step < lengths.size(); ++step)
        for (size_t layer = 0; layer < layers.size(); ++layer) {
          AttendCase one = layers[layer];
          std::tie(one.q_lens, one.seq_lens) = lengths[step];
          const DeviceOutputs& outputs = steps.outputs(step, layer);
          const SharingRun got = {outputs.read(), outputs.fault_count()};
          const std::string what = "told " + std::to_string(told) + ", round " +
                                   std::to_string(round) + ", step " + std::to_string(step) +
                                   ", layer " + std::to_string(layer);
          check_same(got, run_sharing(one, no_plan, Use::kNone), what);
          if (round == 3 && layer == 1) check_results(one, got.outputs, what);
        }
    }
  }
}

}  // namespace
}  // namespace larder::test
