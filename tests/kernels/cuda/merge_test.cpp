// merge and combine on a GPU.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/outputs.h"
#include "tests/kernels/cuda/stored_rows.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr Layout kLayouts[] = {Layout::kDense, Layout::kHeadsFirst, Layout::kGaps};

struct MergeCase {
  struct State {
    TensorView view;
    std::vector<std::byte> out;
    std::vector<float> lse;
  };

  void add(Dtype dtype, Layout layout, std::mt19937_64& engine) {
    State state;
    state.view = view_of(nullptr, dtype, layout, rows, heads, dim);
    state.out.assign(view_bytes(state.view), std::byte{0xFF});
    for (int64_t i = 0; i < rows * heads * dim; ++i)
      put_value(state.out, dtype, at(state.view, i), normal(engine));
    state.lse = normals(rows * heads, engine);
    for (float& lse : state.lse) {
      lse *= 5;
      if (engine() % 8 == 0) lse = -INFINITY;
      if (engine() % 16 == 0) lse = INFINITY;
      if (engine() % 16 == 0) lse = NAN;
    }
    // What a state without keys holds is garbage.
    for (int64_t i = 0; i < rows * heads * dim; ++i)
      if (!std::isfinite(state.lse[static_cast<size_t>(lse_of(i))]))
        put_value(state.out, dtype, at(state.view, i), engine() % 2 == 0 ? 1e30f : -INFINITY);
    states.push_back(std::move(state));
  }
  int64_t lse_of(int64_t i) const {
    const int64_t row = i / (heads * dim);
    const int64_t head = i / dim % heads;
    return state_form.heads_first ? head * rows + row : row * heads + head;
  }
  int64_t at(const TensorView& view, int64_t i) const {
    return i / (heads * dim) * view.strides[0] + i / dim % heads * view.strides[1] +
           i % dim * view.strides[2];
  }

  kernels::AttentionOutput output() const { return output_of(spec, rows, heads, dim); }

  // The arrays of states are on the host on every backend.
  struct Call {
    std::vector<TensorView> outs;
    std::vector<const float*> lses;
    kernels::MergeParams params;
  };
  template <typename Place>
  void fill(Place&& place, Call& call) {
    for (State& state : states) {
      call.outs.push_back(state.view);
      call.outs.back().data = place(state.out);
      call.lses.push_back(place(state.lse));
    }
    call.params.outs = call.outs.data();
    call.params.lses = call.lses.data();
    call.params.num_states = static_cast<int64_t>(states.size());
    call.params.state_form = state_form;
    call.params.sinks = place(sinks);
    call.params.output = output();
  }

  Outputs run_cpu() {
    Outputs host = poisoned(output());
    Call call;
    fill([](auto& values) { return values.empty() ? nullptr : values.data(); }, call);
    point_to(call.params.output, host.out.data(), host.lse.data(), host.sf.data());
    const Status status = kernels::run_merge(call.params);
    CHECK_MESSAGE(status.ok(), status.to_string());
    return host;
  }

  // in_place: the output is that state, which must have the output's view; -1: memory of its own.
  Outputs run_cuda(int in_place = -1) {
    Uploads uploads;
    const DeviceOutputs device(poisoned(output()));
    Call call;
    fill(uploads, call);
    device.point(call.params.output);
    const auto index = static_cast<size_t>(std::max(in_place, 0));
    if (in_place >= 0) {
      call.params.output.out.data = call.outs[index].data;
      call.params.output.lse = const_cast<float*>(call.lses[index]);
    }
    const auto bytes = kernels::merge_workspace_bytes(call.params, kernels::Backend::kCuda);
    REQUIRE(bytes.ok());
    const DeviceBytes workspace(static_cast<size_t>(*bytes));
    const Status status = kernels::run_merge(
        call.params,
        {kernels::Backend::kCuda, nullptr, workspace.data(), *bytes, nullptr, nullptr});
    CHECK_MESSAGE(status.ok(), status.to_string());
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    uploads.check_guards();
    workspace.check_guards();
    if (in_place < 0) return device.read();
    Outputs got = poisoned(output());
    CHECK(cudaMemcpy(got.out.data(), call.params.output.out.data, got.out.size(),
                     cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(cudaMemcpy(got.lse.data(), call.params.output.lse, got.lse.size() * 4,
                     cudaMemcpyDeviceToHost) == cudaSuccess);
    return got;
  }

  std::string describe() const {
    std::ostringstream text;
    text << "merge [" << rows << ", " << heads << ", " << dim << "] of " << states.size()
         << " states, out " << name(spec.dtype) << " layout " << static_cast<int>(spec.layout)
         << " sinks " << !sinks.empty() << " base2 " << state_form.base2 << spec.lse_form.base2
         << " heads first " << state_form.heads_first << spec.lse_form.heads_first;
    return text.str();
  }

  int64_t rows = 1, heads = 1, dim = 16;
  std::vector<State> states;
  std::vector<float> sinks;
  LseForm state_form;
  OutputSpec spec;
};

MergeCase random_merge(std::mt19937_64& engine, int64_t num_states) {
  MergeCase one;
  one.rows = static_cast<int64_t>(1 + engine() % (num_states > 100 ? 2 : 9));
  one.heads = static_cast<int64_t>(1 + engine() % (num_states > 100 ? 2 : 9));
  one.spec.dtype = static_cast<Dtype>(engine() % 5);
  const int64_t dims[] = {16, 64, 128, 512, 1024, 1, 33, 130};
  one.dim = dims[engine() % (one.spec.dtype == Dtype::kE2m1x2 ? 5 : 8)];
  one.spec.layout = kLayouts[engine() % 3];
  one.spec.lse_form = {engine() % 2 == 0, engine() % 2 == 0, engine() % 2 == 0};
  one.spec.out_sf_first_row = static_cast<int64_t>(engine() % 150);
  one.state_form = {engine() % 2 == 0, false, engine() % 2 == 0};
  if (engine() % 2 == 0) one.sinks = normals(one.heads, engine);
  for (int64_t i = 0; i < num_states; ++i)
    one.add(static_cast<Dtype>(engine() % 3), kLayouts[engine() % 3], engine);
  return one;
}

TEST_CASE("merge: any number of states gives the CPU's result") {
  if (!has_gpu()) return;
  auto engine = random_engine(7500);
  CAPTURE(seed());
  for (const int64_t num_states : {1, 2, 3, 5, 8, 47, 48, 49, 96, 97, 300, 4096})
    for (int round = 0; round < (num_states > 100 ? 1 : 12); ++round) {
      MergeCase one = random_merge(engine, num_states);
      compare_outputs(one.output(), one.run_cpu(), one.run_cuda(), one.describe());
    }
}

TEST_CASE("merge: the output may be any of the states") {
  if (!has_gpu()) return;
  auto engine = random_engine(7501);
  CAPTURE(seed());
  for (int round = 0; round < 40; ++round) {
    MergeCase one = random_merge(engine, 0);
    one.spec.dtype = static_cast<Dtype>(round % 3);
    one.state_form.heads_first = one.spec.lse_form.heads_first;
    const int num_states = round % 8 == 0 ? 60 : 1 + round % 4;
    for (int i = 0; i < num_states; ++i) one.add(one.spec.dtype, one.spec.layout, engine);
    const Outputs expected = one.run_cpu();
    const auto which = static_cast<int>(engine() % static_cast<uint64_t>(num_states));
    compare_outputs(one.output(), expected, one.run_cuda(which), "in place: " + one.describe());
  }
}

TEST_CASE("merge: a state that counts alone is passed on bit for bit") {
  if (!has_gpu()) return;
  auto engine = random_engine(7502);
  CAPTURE(seed());
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16})
    for (const bool base2 : {false, true})
      for (const int num_states : {1, 3, 70}) {
        MergeCase one;
        one.rows = 3;
        one.heads = 2;
        one.dim = 200;
        one.spec.dtype = dtype;
        one.state_form.base2 = one.spec.lse_form.base2 = base2;
        for (int i = 0; i < num_states; ++i) one.add(dtype, Layout::kDense, engine);
        const auto alone = static_cast<size_t>(num_states / 2);
        const float nothing[] = {-INFINITY, INFINITY, NAN};
        for (size_t i = 0; i < one.states.size(); ++i)
          for (float& lse : one.states[i].lse)
            lse = i == alone ? 700 * normal(engine) : nothing[i % 3];
        MergeCase::State& state = one.states[alone];
        for (int64_t i = 0; i < 1200; ++i)
          put_value(state.out, dtype, i, std::ldexp(normal(engine), -static_cast<int>(i % 30)));
        put_value(state.out, dtype, 5, -0.0f);
        put_value(state.out, dtype, 6, INFINITY);
        if (dtype == Dtype::kFp32) put_value(state.out, dtype, 7, 1e-45f);
        const Outputs got = one.run_cuda();
        CAPTURE(one.describe());
        CHECK(std::equal(got.out.begin(), got.out.end(), state.out.begin()));
        CHECK(got.lse == state.lse);
      }
}

TEST_CASE("merge: a captured call follows the states' values") {
  if (!has_gpu()) return;
  auto engine = random_engine(7503);
  CAPTURE(seed());
  for (const int64_t num_states : {3, 70}) {
    MergeCase one;
    one.heads = 4;
    one.dim = 64;
    for (int64_t i = 0; i < num_states; ++i) one.add(Dtype::kFp32, Layout::kDense, engine);
    Uploads uploads;
    const DeviceOutputs device(poisoned(one.output()));
    MergeCase::Call call;
    one.fill(uploads, call);
    device.point(call.params.output);
    const auto bytes = kernels::merge_workspace_bytes(call.params, kernels::Backend::kCuda);
    REQUIRE(bytes.ok());
    const DeviceBytes workspace(static_cast<size_t>(*bytes));
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    const Status status = kernels::run_merge(
        call.params, {kernels::Backend::kCuda, stream, workspace.data(), *bytes, nullptr, nullptr});
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE_MESSAGE(status.ok(), status.to_string());
    REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
    for (int round = 0; round < 2; ++round) {
      for (size_t i = 0; i < one.states.size(); ++i) {
        for (float& lse : one.states[i].lse) lse = normal(engine);
        CHECK(cudaMemcpy(const_cast<float*>(call.lses[i]), one.states[i].lse.data(),
                         one.states[i].lse.size() * 4, cudaMemcpyHostToDevice) == cudaSuccess);
      }
      CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
      compare_outputs(one.output(), one.run_cpu(), device.read(), "graph: " + one.describe());
    }
    CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  }
}

TEST_CASE("combine: every rank gives the CPU's share") {
  if (!has_gpu()) return;
  auto engine = random_engine(7510);
  CAPTURE(seed());
  for (int round = 0; round < 80; ++round) {
    MergeCase one = random_merge(engine, 1);
    one.spec.dtype = static_cast<Dtype>(round % 3);
    one.states.clear();
    one.add(one.spec.dtype, one.spec.layout, engine);
    const int64_t num_ranks = round % 10 == 0 ? 300 : static_cast<int64_t>(1 + engine() % 8);
    std::vector<float> lses = normals(num_ranks * one.rows * one.heads, engine);
    for (float& lse : lses) {
      if (engine() % 5 == 0) lse = -INFINITY;
      if (engine() % 20 == 0) lse = engine() % 2 == 0 ? NAN : INFINITY;
    }
    kernels::CombineParams params;
    params.num_ranks = num_ranks;
    params.rank = static_cast<int64_t>(engine() % static_cast<uint64_t>(num_ranks));
    params.lse_form = one.spec.lse_form;

    MergeCase::State on_cpu = one.states[0];
    std::vector<float> total(static_cast<size_t>(one.rows * one.heads), NAN);
    kernels::CombineParams host = params;
    host.out = on_cpu.view;
    host.out.data = on_cpu.out.data();
    host.lses = lses.data();
    host.sinks = one.sinks.empty() ? nullptr : one.sinks.data();
    host.total_lse = total.data();
    const Status expected = kernels::run_combine(host);
    CHECK_MESSAGE(expected.ok(), expected.to_string());

    Uploads uploads;
    const DeviceBytes out(one.states[0].out);
    const DeviceBytes device_total(total.size() * 4);
    kernels::CombineParams device = params;
    device.out = on_cpu.view;
    device.out.data = out.data();
    device.lses = uploads(lses);
    device.sinks = uploads(one.sinks);
    device.total_lse = device_total.data<float>();
    const Status status = kernels::run_combine(
        device, {kernels::Backend::kCuda, nullptr, nullptr, 0, nullptr, nullptr});
    CHECK_MESSAGE(status.ok(), status.to_string());
    compare_outputs(one.output(), {on_cpu.out, total, {}},
                    {out.read(), device_total.read<float>(), {}},
                    "combine, ranks " + std::to_string(num_ranks) + ": " + one.describe());
    uploads.check_guards();
  }
}

TEST_CASE("merge and combine without rows do nothing") {
  if (!has_gpu()) return;
  auto engine = random_engine(7511);
  MergeCase one;
  one.rows = 0;
  one.add(Dtype::kFp32, Layout::kDense, engine);
  compare_outputs(one.output(), one.run_cpu(), one.run_cuda(), one.describe());
}

}  // namespace
}  // namespace larder::test
