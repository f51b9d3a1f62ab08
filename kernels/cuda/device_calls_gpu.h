// Private to kernels/cuda: DeviceCalls with CUDA.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/choose.h"
#include "kernels/cuda/device_calls_context.h"
#include "kernels/cuda/device_calls_staging.h"
#include "kernels/device_calls.h"
#include "kernels/kernel_table.h"

namespace larder::kernels::cuda {

// An op as kernel_table.h has it.
template <typename Params>
struct Op {
  Status (*validate)(const Params& params, Tables tables);
  std::span<const Kernel<Params>> (*kernels)();
  Status (*run)(const Params& params, const Target& target);
};

class GpuCalls final : public DeviceCalls {
 public:
  explicit GpuCalls(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  ~GpuCalls() override;
  Status open(void* stream);

  Status append(const AppendParams& params) override;
  Status gather(const GatherParams& params) override;
  Status attend(const AttendParams& params) override;
  Status sparse_mla(const SparseMlaParams& params) override;
  Status merge(const MergeParams& params) override;
  Status combine(const CombineParams& params) override;
  Status convert(const ConvertParams& params) override;
  Status copy(const CopyParams& params) override;
  Status scrub(const ScrubParams& params) override;
  Status checksum(const ChecksumParams& params) override;

  Status append_on(const AppendParams& params, void* stream, const BlockRights* rights,
                   CallFaults* faults) override;
  Status gather_on(const GatherParams& params, void* stream, const BlockRights* rights,
                   CallFaults* faults) override;
  Status attend_on(const AttendParams& params, void* stream, const BlockRights* rights,
                   CallFaults* faults) override;
  Status sparse_mla_on(const SparseMlaParams& params, void* stream, const BlockRights* rights,
                       CallFaults* faults) override;
  Status merge_on(const MergeParams& params, void* stream) override;
  Status combine_on(const CombineParams& params, void* stream) override;
  Status convert_on(const ConvertParams& params, void* stream, const BlockRights* rights,
                    CallFaults* faults) override;
  Status copy_on(const CopyParams& params, void* stream, const BlockRights* rights,
                 CallFaults* faults) override;
  Status scrub_on(const ScrubParams& params, void* stream, const BlockRights* rights,
                  CallFaults* faults) override;
  Status checksum_on(const ChecksumParams& params, void* stream, const BlockRights* rights,
                     CallFaults* faults) override;

  void* stream() const override { return stream_; }
  Status copy_bytes(std::span<const ByteCopy> copies) override;
  Status wait() override;
  bool is_done() override;
  bool is_dead() const override { return !dead_.ok(); }

  Result<DeviceArray> copy_to_device(const void* bytes, int64_t size_bytes) override;
  Result<RegisteredMemory> register_host_memory(void* memory, int64_t size_bytes) override;
  Result<IpcMemory> open_ipc_memory(const IpcHandle& handle, int64_t size_bytes) override;
  Result<DeviceMemoryInfo> memory_info() override;
  Status write_word(void* stream, uint64_t* word, uint64_t value) override;
  Status wait_word(void* stream, uint64_t* word, uint64_t value) override;

 private:
  struct Workspace {
    std::byte* data = nullptr;
    int64_t size_bytes = 0;
    bool is_captured = false;  // a graph may use it
  };

  // Every entry: `body` with the device current, its error remembered if the context died of it.
  template <typename Body>
  Status with_device(Body body) {
    if (!dead_.ok()) return dead_;
    const Context::Current current(*context_);
    if (!current.status().ok()) return current.status();
    // Else a launch here would report what another library left.
    (void)cudaGetLastError();
    return remember(body());
  }
  Status remember(Status status);

  // The stages of a plain call whose memory is known; `launch_all` reads parameters that now have
  // the addresses on the device.
  template <typename LaunchAll>
  Status run_staged(StagedCall& memory, LaunchAll launch_all) {
    if (!memory.status().ok()) return memory.status();
    bool is_capturing = false;
    if (Status s = ask_capturing(stream_, is_capturing); !s.ok()) return s;
    if (is_capturing)
      return {ErrorCode::kInvalidArgument,
              "the stream is being captured: expected the call that takes tables in device memory"};
    if (Status s = stager_.send(memory, stream_); !s.ok()) return s;
    if (Status s = launch_all(); !s.ok()) return s;
    return stager_.fetch(stream_);
  }
  template <typename Params>
  Status run_staged(const Op<Params>& op, StagedCall& memory, const Params& params) {
    return run_staged(memory, [&] { return launch(op, params, stream_, nullptr, nullptr); });
  }
  Status launch_layers(std::vector<AppendParams>& layers);

  template <typename Params>
  Status launch(const Op<Params>& op, const Params& params, cudaStream_t stream,
                const BlockRights* rights, CallFaults* faults) {
    if (Status s = op.validate(params, Tables::kDevice); !s.ok()) return s;
    const auto row = choose(op.kernels(), params, Backend::kCuda);
    if (!row) return row.status();
    Target target;
    target.backend = Backend::kCuda;
    target.stream = stream;
    target.rights = rights;
    target.faults = faults;
    if ((*row)->workspace_bytes != nullptr)
      if (Status s = reserve_workspace((*row)->workspace_bytes(params), target); !s.ok()) return s;
    return op.run(params, target);
  }
  template <typename Params>
  Status launch_on(const Op<Params>& op, const Params& params, void* stream,
                   const BlockRights* rights, CallFaults* faults) {
    return with_device(
        [&] { return launch(op, params, static_cast<cudaStream_t>(stream), rights, faults); });
  }

  static Status ask_capturing(cudaStream_t stream, bool& is_capturing);
  // Gives the target the workspace of its stream.
  Status reserve_workspace(int64_t bytes, Target& target);
  // The address of a word for the driver.
  Status find_word(const uint64_t* word, CUdeviceptr& address);

  const std::shared_ptr<Context> context_;  // shared with memory that came from here
  cudaStream_t stream_ = nullptr;
  bool owns_stream_ = false;
  cudaEvent_t probe_ = nullptr;  // never recorded: asking for it fails in a dead context only
  Status dead_;
  Stager stager_;
  std::map<cudaStream_t, Workspace> workspaces_;
  std::vector<std::byte*> kept_workspaces_;  // too small now, but of captures
};

}  // namespace larder::kernels::cuda
