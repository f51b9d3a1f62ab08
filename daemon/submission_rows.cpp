// Calls on request that write rows into slots or read them back: append and gather.
#include <algorithm>

#include "daemon/submission_call.h"
#include "kernels/kernel_table.h"

namespace larder::daemon {

Result<SubmissionWork> run_append(const SubmissionCall& call) {
  const auto k = call.view_tensor("k", call.record.first, protocol::ImportPlace::kFirst);
  if (!k) return k.status();
  const auto v = call.view_tensor("v", call.record.second, protocol::ImportPlace::kSecond);
  if (!v) return v.status();
  kernels::AppendParams params;
  params.layer = call.layer();
  params.k = *k;
  params.v = *v;
  if (call.has_device_tables()) return run_append_device_tables(call, params);
  const auto slots =
      call.copy_table<int64_t>("slots", call.record.slots, protocol::kMaxRowsPerCall);
  if (!slots) return slots.status();
  params.slots = slots->data();
  params.num_slots = static_cast<int64_t>(slots->size());
  if (Status status = kernels::validate_append(params); !status.ok()) return status;
  uint64_t appended = 0;
  for (const int64_t slot : *slots) {
    if (slot < 0) continue;
    const int64_t block = slot / params.layer.geometry.block_tokens;
    if (Status status = call.may_write("slot " + std::to_string(slot), block); !status.ok())
      return status;
    ++appended;
  }
  if (Status status = kernels::run_on(call.group.device, params); !status.ok()) return status;
  return SubmissionWork{appended, 0};
}

Result<SubmissionWork> run_gather(const SubmissionCall& call) {
  const auto k_out = call.view_tensor("k_out", call.record.first, protocol::ImportPlace::kFirst);
  if (!k_out) return k_out.status();
  const auto v_out = call.view_tensor("v_out", call.record.second, protocol::ImportPlace::kSecond);
  if (!v_out) return v_out.status();
  kernels::GatherParams params;
  params.layer = call.layer();
  params.k_out = *k_out;
  params.v_out = *v_out;
  if (call.has_device_tables()) return run_gather_device_tables(call, params);
  const auto slots =
      call.copy_table<int64_t>("slots", call.record.slots, protocol::kMaxRowsPerCall);
  if (!slots) return slots.status();
  if (slots->empty()) return SubmissionWork{};
  params.slots = slots->data();
  params.num_slots = static_cast<int64_t>(slots->size());
  if (Status status = kernels::validate_gather(params); !status.ok()) return status;
  for (const int64_t slot : *slots) {
    if (slot < 0) continue;
    const int64_t block = slot / params.layer.geometry.block_tokens;
    if (Status status = call.may_read("slot " + std::to_string(slot), block); !status.ok())
      return status;
  }
  if (Status status = kernels::run_on(call.group.device, params); !status.ok()) return status;
  return SubmissionWork{};
}

}  // namespace larder::daemon
