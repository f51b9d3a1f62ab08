// Calls on request whose tables lie in imports: nobody can look at them before the kernel does. It
// checks each entry where it uses it; what is wrong is left out, and reported here.
#include "daemon/submission_call.h"
#include "kernels/kernel_table.h"

namespace larder::daemon {
namespace {

using protocol::ImportPlace;

Status check_device_tables(const SubmissionCall& call, std::initializer_list<ImportPlace> needed) {
  if (call.group.device == nullptr)
    return {ErrorCode::kUnsupported,
            "tables in imports are read by kernels on a GPU, and the pool is host memory"};
  for (const ImportPlace place : needed)
    if (call.record.imports[static_cast<size_t>(place)] == 0)
      return invalid("imports[" + std::to_string(static_cast<int>(place)) +
                     "] is 0: where one table of a call lies in an import, all do");
  return {};
}

// Waits for the launch, and says what it has found wrong.
template <typename Launch>
Status run_checked(const SubmissionCall& call, const char* what, const Launch& launch) {
  const MappedGroup& group = call.group;
  *group.faults = {};
  const kernels::BlockRights rights = call.rights();
  if (Status status = launch(&rights, group.device_faults); !status.ok()) return status;
  if (Status status = group.device->wait(); !status.ok()) return status;
  const kernels::CallFaults faults = *group.faults;
  if (faults.count == 0) return {};
  return {
      ErrorCode::kPermissionDenied,
      std::string(what) + ": " + std::to_string(faults.count) +
          " entries name blocks that are not this session's, or are out of range, one of them " +
          std::to_string(faults.first_value) + "; they were left out, the rest was done"};
}

// Of append and gather: one table, of slots.
template <typename Params, typename Launch>
Result<SubmissionWork> run_on_slots(const SubmissionCall& call, Params params,
                                    const SubmissionWork& work, const Launch& launch) {
  if (Status s = check_device_tables(call, {ImportPlace::kSlots}); !s.ok()) return s;
  const auto slots = call.device_table<int64_t>("slots", call.record.slots, ImportPlace::kSlots,
                                                protocol::kMaxRowsPerCall);
  if (!slots) return slots.status();
  params.slots = *slots;
  params.num_slots = static_cast<int64_t>(call.record.slots.count);
  const Status status = run_checked(call, "slots", [&](const auto* rights, auto* faults) {
    return launch(*call.group.device, params, rights, faults);
  });
  if (!status.ok()) return status;
  return work;
}

}  // namespace

Result<SubmissionWork> run_append_device_tables(const SubmissionCall& call,
                                                kernels::AppendParams params) {
  return run_on_slots(call, params, {call.record.slots.count, 0},
                      [](auto& device, const auto& whole, const auto* rights, auto* faults) {
                        return device.append_on(whole, device.stream(), rights, faults);
                      });
}

Result<SubmissionWork> run_gather_device_tables(const SubmissionCall& call,
                                                kernels::GatherParams params) {
  return run_on_slots(call, params, {},
                      [](auto& device, const auto& whole, const auto* rights, auto* faults) {
                        return device.gather_on(whole, device.stream(), rights, faults);
                      });
}

Result<SubmissionWork> run_attend_device_tables(const SubmissionCall& call,
                                                kernels::AttendParams params) {
  const protocol::Submission& record = call.record;
  kernels::DeviceCalls& device = *call.group.device;
  const auto num_seqs = record.q_lens.count;
  if (record.seq_lens.count != num_seqs ||
      record.block_table_stride > static_cast<uint64_t>(protocol::kMaxTableEntriesPerCall) ||
      record.block_table.count != num_seqs * record.block_table_stride)
    return invalid("q_lens has " + std::to_string(num_seqs) + " entries, seq_lens " +
                   std::to_string(record.seq_lens.count) + ", block_table " +
                   std::to_string(record.block_table.count) + " with a stride of " +
                   std::to_string(record.block_table_stride));
  const auto q_lens = call.device_table<int32_t>("q_lens", record.q_lens, ImportPlace::kQLens,
                                                 protocol::kMaxSequencesPerCall);
  if (!q_lens) return q_lens.status();
  const auto seq_lens = call.device_table<int32_t>(
      "seq_lens", record.seq_lens, ImportPlace::kSeqLens, protocol::kMaxSequencesPerCall);
  if (!seq_lens) return seq_lens.status();
  const auto table =
      call.device_table<int32_t>("block_table", record.block_table, ImportPlace::kBlockTable,
                                 protocol::kMaxTableEntriesPerCall);
  if (!table) return table.status();
  params.q_lens = *q_lens;
  params.seq_lens = *seq_lens;
  params.block_table = *table;
  params.num_seqs = static_cast<int64_t>(num_seqs);
  params.block_table_stride = static_cast<int64_t>(record.block_table_stride);
  // Copied by the caller to host memory of ours, which the kernel cannot read.
  const auto per_head = static_cast<int64_t>(params.q.shape[1] * sizeof(float));
  kernels::DeviceArray sinks, slopes;
  for (auto& [values, copy] :
       {std::pair(&params.sinks, &sinks), std::pair(&params.alibi_slopes, &slopes)}) {
    if (*values == nullptr) continue;
    auto copied = device.copy_to_device(*values, per_head);
    if (!copied) return copied.status();
    *copy = std::move(*copied);
    *values = reinterpret_cast<const float*>(copy->memory.get());
  }
  const Status status = run_checked(call, "tables", [&](const auto* rights, auto* faults) {
    return device.attend_on(params, device.stream(), rights, faults);
  });
  if (!status.ok()) return status;
  return SubmissionWork{0, static_cast<uint64_t>(params.q.shape[0])};
}

// Before the tables of the call are looked at.
Status check_attend_device_tables(const SubmissionCall& call) {
  if (Status s = check_device_tables(
          call, {ImportPlace::kQLens, ImportPlace::kSeqLens, ImportPlace::kBlockTable});
      !s.ok())
    return s;
  if (call.record.mask.count != 0)
    return {ErrorCode::kUnsupported,
            "mask: with tables in imports, masks are not served; tables in the arena are"};
  return {};
}

}  // namespace larder::daemon
