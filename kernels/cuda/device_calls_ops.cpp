// The ops of DeviceCalls but those of rows: which memory of each is a table, is read, or is
// written.
#include <vector>

#include "kernels/cuda/device_calls_gpu.h"
#include "kernels/cuda/short_table.h"
#include "kernels/paged_kv_check.h"

namespace larder::kernels::cuda {
namespace {

constexpr Op<AttendParams> kAttend = {validate_attend, attend_kernels, run_attend};
constexpr Op<SparseMlaParams> kSparseMla = {validate_sparse_mla, sparse_mla_kernels,
                                            run_sparse_mla};
constexpr Op<MergeParams> kMerge = {
    [](const MergeParams& params, Tables) { return validate_merge(params); }, merge_kernels,
    run_merge};
constexpr Op<CombineParams> kCombine = {
    [](const CombineParams& params, Tables) { return validate_combine(params); }, combine_kernels,
    run_combine};
constexpr Op<ConvertParams> kConvert = {validate_convert, convert_kernels, run_convert};
constexpr Op<CopyParams> kCopy = {validate_copy, copy_kernels, run_copy};
constexpr Op<ScrubParams> kScrub = {validate_scrub, scrub_kernels, run_scrub};
constexpr Op<ChecksumParams> kChecksum = {validate_checksum, checksum_kernels, run_checksum};

void stage_output(StagedCall& memory, AttentionOutput& output) {
  const int64_t num_lses = output.out.shape[0] * output.out.shape[1];
  memory.array("out_sf", Way::kInOut, output.out_sf, out_sf_bytes(output));
  memory.array("lse", Way::kOut, output.lse, num_lses);
  memory.tensor("out", Way::kOut, output.out);
}

}  // namespace

Status GpuCalls::attend(const AttendParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    memory.needs_host("q_lens", call.q_lens).needs_host("seq_lens", call.seq_lens);
    memory.needs_host("block_table", call.block_table);
    if (const Status& s = memory.needs_host("mask_offsets", call.mask_offsets).status(); !s.ok())
      return s;
    if (Status s = validate_attend(call); !s.ok()) return s;
    const ShortTable table =
        short_table(call.block_table, call.block_table_stride, call.seq_lens, call.num_seqs,
                    call.layer.geometry.block_tokens, call.shard);
    AttendParams params = call;
    params.block_table = table.entries.data();
    // 0 where there is no table: no row sees a key then, and the kernel takes the lengths as 0.
    params.block_table_stride = table.stride;
    memory.table("block_table", params.block_table, params.num_seqs * table.stride);
    memory.table("q_lens", params.q_lens, params.num_seqs);
    memory.table("seq_lens", params.seq_lens, params.num_seqs);
    if (params.mask != nullptr) {
      memory.table("mask_offsets", params.mask_offsets, params.num_seqs);
      memory.array("mask", Way::kIn, params.mask, params.mask_bytes);
    }
    memory.array("sinks", Way::kIn, params.sinks, params.q.shape[1]);
    memory.array("alibi_slopes", Way::kIn, params.alibi_slopes, params.q.shape[1]);
    memory.tensor("q", Way::kIn, params.q);
    stage_output(memory, params.output);
    return run_staged(kAttend, memory, params);
  });
}

Status GpuCalls::sparse_mla(const SparseMlaParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    if (const Status& s = memory.needs_host("topk_lens", call.topk_lens).status(); !s.ok())
      return s;
    if (Status s = validate_sparse_mla(call); !s.ok()) return s;
    SparseMlaParams params = call;
    const int64_t num_rows = params.q.shape[0];
    memory.table("topk_lens", params.topk_lens, num_rows);
    memory.array("indices", Way::kIn, params.indices, num_rows * params.top_k);
    memory.array("sinks", Way::kIn, params.sinks, params.q.shape[1]);
    memory.tensor("q", Way::kIn, params.q);
    stage_output(memory, params.output);
    return run_staged(kSparseMla, memory, params);
  });
}

Status GpuCalls::merge(const MergeParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    if (const Status& s =
            memory.needs_host("outs", call.outs).needs_host("lses", call.lses).status();
        !s.ok())
      return s;
    if (Status s = validate_merge(call); !s.ok()) return s;
    std::vector<TensorView> outs(call.outs, call.outs + call.num_states);
    std::vector<const float*> lses(call.lses, call.lses + call.num_states);
    MergeParams params = call;
    params.outs = outs.data();
    params.lses = lses.data();
    for (TensorView& out : outs) memory.tensor("outs", Way::kIn, out);
    for (const float*& lse : lses)
      memory.array("lses", Way::kIn, lse, outs[0].shape[0] * outs[0].shape[1]);
    memory.array("sinks", Way::kIn, params.sinks, outs[0].shape[1]);
    stage_output(memory, params.output);
    return run_staged(kMerge, memory, params);
  });
}

Status GpuCalls::combine(const CombineParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    if (Status s = validate_combine(call); !s.ok()) return s;
    CombineParams params = call;
    const int64_t num_lses = params.out.shape[0] * params.out.shape[1];
    memory.array("lses", Way::kIn, params.lses, num_lses * params.num_ranks);
    memory.array("sinks", Way::kIn, params.sinks, params.out.shape[1]);
    memory.tensor("out", Way::kInOut, params.out);
    memory.array("total_lse", Way::kOut, params.total_lse, num_lses);
    return run_staged(kCombine, memory, params);
  });
}

Status GpuCalls::convert(const ConvertParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    if (const Status& s = memory.needs_host("blocks", call.blocks).status(); !s.ok()) return s;
    if (Status s = validate_convert(call); !s.ok()) return s;
    ConvertParams params = call;
    memory.table("blocks", params.blocks, params.num_blocks);
    const auto regions = paged_regions(call.paged, call.layer.page);
    PagedKv& paged = params.paged;
    const Way way = call.to_pool ? Way::kIn : Way::kOut;
    memory.paged_rows("k_data", way, paged.k_data, call.paged, regions[0].row_bytes);
    memory.paged_rows("k_scale", way, paged.k_scale, call.paged, regions[1].row_bytes);
    memory.paged_rows("v_data", way, paged.v_data, call.paged, regions[2].row_bytes);
    memory.paged_rows("v_scale", way, paged.v_scale, call.paged, regions[3].row_bytes);
    return run_staged(kConvert, memory, params);
  });
}

Status GpuCalls::copy(const CopyParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    if (const Status& s = memory.needs_host("from", call.from).needs_host("to", call.to).status();
        !s.ok())
      return s;
    if (Status s = validate_copy(call); !s.ok()) return s;
    CopyParams params = call;
    memory.table("from", params.from, params.count);
    memory.table("to", params.to, params.count);
    return run_staged(kCopy, memory, params);
  });
}

Status GpuCalls::scrub(const ScrubParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    if (const Status& s = memory.needs_host("blocks", call.blocks).status(); !s.ok()) return s;
    if (Status s = validate_scrub(call); !s.ok()) return s;
    ScrubParams params = call;
    memory.table("blocks", params.blocks, params.count);
    return run_staged(kScrub, memory, params);
  });
}

Status GpuCalls::checksum(const ChecksumParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    if (const Status& s = memory.needs_host("blocks", call.blocks).status(); !s.ok()) return s;
    if (Status s = validate_checksum(call); !s.ok()) return s;
    ChecksumParams params = call;
    memory.table("blocks", params.blocks, params.count);
    memory.array("checksums", Way::kOut, params.checksums, params.count);
    return run_staged(kChecksum, memory, params);
  });
}

Status GpuCalls::attend_on(const AttendParams& params, void* stream, const BlockRights* rights,
                           CallFaults* faults) {
  return launch_on(kAttend, params, stream, rights, faults);
}
Status GpuCalls::sparse_mla_on(const SparseMlaParams& params, void* stream,
                               const BlockRights* rights, CallFaults* faults) {
  return launch_on(kSparseMla, params, stream, rights, faults);
}
Status GpuCalls::merge_on(const MergeParams& params, void* stream) {
  return launch_on(kMerge, params, stream, nullptr, nullptr);
}
Status GpuCalls::combine_on(const CombineParams& params, void* stream) {
  return launch_on(kCombine, params, stream, nullptr, nullptr);
}
Status GpuCalls::convert_on(const ConvertParams& params, void* stream, const BlockRights* rights,
                            CallFaults* faults) {
  return launch_on(kConvert, params, stream, rights, faults);
}
Status GpuCalls::copy_on(const CopyParams& params, void* stream, const BlockRights* rights,
                         CallFaults* faults) {
  return launch_on(kCopy, params, stream, rights, faults);
}
Status GpuCalls::scrub_on(const ScrubParams& params, void* stream, const BlockRights* rights,
                          CallFaults* faults) {
  return launch_on(kScrub, params, stream, rights, faults);
}
Status GpuCalls::checksum_on(const ChecksumParams& params, void* stream, const BlockRights* rights,
                             CallFaults* faults) {
  return launch_on(kChecksum, params, stream, rights, faults);
}

}  // namespace larder::kernels::cuda
