#include "daemon/submission.h"

#include <algorithm>
#include <atomic>

#include "daemon/submission_call.h"
#include "kernels/kernel_table.h"

namespace larder::daemon {
namespace {

uint64_t owner_of(const MappedGroup& group, int64_t block) {
  auto* words = reinterpret_cast<uint64_t*>(group.owners.data());
  return std::atomic_ref(words[block]).load(std::memory_order_acquire);
}

bool is_about_bytes(protocol::Op op) {
  return op == protocol::Op::kReadPages || op == protocol::Op::kWritePages ||
         op == protocol::Op::kScrub || op == protocol::Op::kChecksum;
}

}  // namespace

Status SubmissionCall::check_record() const {
  if ((record.flags & ~protocol::kKnownFlags) != 0)
    return invalid("flags is " + std::to_string(record.flags) + ", known are " +
                   std::to_string(protocol::kKnownFlags));
  if (std::any_of(record.reserved.begin(), record.reserved.end(),
                  [](uint8_t byte) { return byte != 0; }))
    return invalid("the record's reserved bytes are not zero");
  if (record.layer >= static_cast<uint32_t>(group.view.geometry.num_layers))
    return invalid("layer is " + std::to_string(record.layer) + ", the pool has " +
                   std::to_string(group.view.geometry.num_layers));
  if (record.signal_word != protocol::kNoWord && record.signal_word >= protocol::kTimelineWords)
    return invalid("signal_word is " + std::to_string(record.signal_word) + ", there are " +
                   std::to_string(protocol::kTimelineWords));
  if (group.view.opaque && !is_about_bytes(static_cast<protocol::Op>(record.op)))
    return {ErrorCode::kUnsupported, "op is " + std::to_string(record.op) +
                                         " on an opaque group: its bytes have no K and V"};
  return {};
}

kernels::LayerView SubmissionCall::layer() const {
  kernels::LayerView result = view_layer(group.view, group.layout, group.memory->base(),
                                         static_cast<int32_t>(record.layer));
  if (group.device != nullptr && result.key_offset != nullptr)
    result.key_offset = reinterpret_cast<const float*>(group.device_key_offsets.memory.get()) +
                        (result.key_offset - group.view.key_offsets.data());
  return result;
}

kernels::BlockRights SubmissionCall::rights() const {
  return {reinterpret_cast<const uint64_t*>(group.device_owners.on_device),
          owner_word(OwnerState::kOpen, session_), owner_word(OwnerState::kPublished)};
}

bool SubmissionCall::has_device_tables() const {
  using protocol::ImportPlace;
  for (const ImportPlace place :
       {ImportPlace::kSlots, ImportPlace::kQLens, ImportPlace::kSeqLens, ImportPlace::kBlockTable})
    if (record.imports[static_cast<size_t>(place)] != 0) return true;
  return false;
}

Result<std::byte*> SubmissionCall::view_import(const char* field, uint64_t offset_bytes,
                                               uint64_t count, size_t element_bytes,
                                               protocol::ImportPlace place,
                                               int64_t max_count) const {
  const uint64_t id = record.imports[static_cast<size_t>(place)];
  const auto found = imports_.find(id);
  if (found == imports_.end())
    return Status(ErrorCode::kNotFound, std::string(field) + ": import " + std::to_string(id) +
                                            " is not one of this session");
  if (count > static_cast<uint64_t>(max_count))
    return invalid(std::string(field) + " has " + std::to_string(count) + " entries, at most " +
                   std::to_string(max_count) + " are allowed");
  const ImportedMemory& memory = found->second;
  const uint64_t bytes = count * element_bytes;
  if (offset_bytes > memory.size_bytes || bytes > memory.size_bytes - offset_bytes)
    return invalid(std::string(field) + ": " + std::to_string(bytes) + " bytes at offset " +
                   std::to_string(offset_bytes) + " are not in the import's " +
                   std::to_string(memory.size_bytes));
  std::byte* const data = memory.base + offset_bytes;
  if (reinterpret_cast<uintptr_t>(data) % element_bytes != 0)
    return invalid(std::string(field) + ": offset " + std::to_string(offset_bytes) +
                   " is not aligned to " + std::to_string(element_bytes));
  return data;
}

Result<std::span<std::byte>> SubmissionCall::view_bytes(const char* field,
                                                        const protocol::ArenaArray& array,
                                                        size_t element_bytes,
                                                        int64_t max_count) const {
  if (array.count > static_cast<uint64_t>(max_count))
    return invalid(std::string(field) + " has " + std::to_string(array.count) +
                   " entries, at most " + std::to_string(max_count) + " are allowed");
  const uint64_t bytes = array.count * element_bytes;
  if (bytes == 0) return std::span<std::byte>();
  if (!arena_.holds(array.offset_bytes, bytes))
    return invalid(std::string(field) + ": " + std::to_string(bytes) + " bytes at offset " +
                   std::to_string(array.offset_bytes) + " are not in the arena's data part");
  return arena_.memory().subspan(array.offset_bytes, bytes);
}

Result<TensorView> SubmissionCall::view_tensor(const char* field,
                                               const protocol::TensorRecord& tensor,
                                               protocol::ImportPlace place) const {
  const bool imported = tensor.memory == static_cast<uint32_t>(protocol::TensorMemory::kImport);
  if (!imported && tensor.memory != static_cast<uint32_t>(protocol::TensorMemory::kArena))
    return Status(ErrorCode::kUnsupported,
                  std::string(field) + ".memory is " + std::to_string(tensor.memory) +
                      ": tensors in the arena (0) and in imports (2) are served");
  if (tensor.dtype >= kDtypeNames.size())
    return invalid(std::string(field) + ".dtype is " + std::to_string(tensor.dtype) +
                   ", known are 0 to " + std::to_string(kDtypeNames.size() - 1));
  TensorView view;
  view.dtype = static_cast<Dtype>(tensor.dtype);
  view.shape = tensor.shape;
  view.strides = tensor.strides;
  const auto& [rows, heads, dim] = view.shape;
  if (rows < 0 || rows > protocol::kMaxRowsPerCall || heads < 0 ||
      heads > kernels::kMaxQueryHeads || dim < 0 || dim > kernels::kMaxHeadDim)
    return invalid(std::string(field) + " is [" + std::to_string(rows) + ", " +
                   std::to_string(heads) + ", " + std::to_string(dim) + "]: at most [" +
                   std::to_string(protocol::kMaxRowsPerCall) + ", " +
                   std::to_string(kernels::kMaxQueryHeads) + ", " +
                   std::to_string(kernels::kMaxHeadDim) + "] go in one call");
  // Rows on top of each other would let a small call ask for endless work.
  if (view.strides != std::array<int64_t, 3>{heads * dim, dim, 1})
    return invalid(std::string(field) + " must be dense in a call on request");
  if (imported) {
    const auto data =
        view_import(field, tensor.offset_bytes, static_cast<uint64_t>(rows * heads * dim),
                    static_cast<size_t>(dtype_bytes(view.dtype)), place, INT64_MAX);
    if (!data) return data.status();
    view.data = *data;
    return view;
  }
  const auto offset = static_cast<int64_t>(tensor.offset_bytes);
  const auto bytes = static_cast<uint64_t>(rows * heads * dim * dtype_bytes(view.dtype));
  if (offset < 0 || offset % dtype_bytes(view.dtype) != 0 ||
      (bytes > 0 && !arena_.holds(tensor.offset_bytes, bytes)))
    return invalid(std::string(field) + ": " + std::to_string(bytes) + " bytes at offset " +
                   std::to_string(tensor.offset_bytes) +
                   " are not aligned, or not in the arena's data part");
  view.data = arena_.memory().data() + (bytes > 0 ? offset : 0);
  return view;
}

Status SubmissionCall::may_write(const std::string& what, int64_t block) const {
  if (may_append(owner_of(group, block), session_)) return {};
  return {ErrorCode::kPermissionDenied,
          what + ": block " + std::to_string(block) + " is not open in this session"};
}

Status SubmissionCall::may_read(const std::string& what, int64_t block) const {
  if (may_attend(owner_of(group, block), session_)) return {};
  return {ErrorCode::kPermissionDenied, what + ": block " + std::to_string(block) +
                                            " is neither published nor open in this session"};
}

Result<SubmissionWork> run_submission(const protocol::Submission& submission,
                                      const protocol::Arena& arena, const MappedGroup& group,
                                      SessionId session, const Imports& imports) {
  const SubmissionCall call(submission, arena, group, session, imports);
  if (Status status = call.check_record(); !status.ok()) return status;
  switch (static_cast<protocol::Op>(submission.op)) {
    case protocol::Op::kAppend:
      return run_append(call);
    case protocol::Op::kAttend:
      return run_attend(call);
    case protocol::Op::kGather:
      return run_gather(call);
    case protocol::Op::kSparseAttend:
      return run_sparse_attend(call);
    case protocol::Op::kReadPages:
      return run_read_pages(call);
    case protocol::Op::kWritePages:
      return run_write_pages(call);
    case protocol::Op::kScrub:
      return run_scrub(call);
    case protocol::Op::kChecksum:
      return run_checksum(call);
  }
  return Status(ErrorCode::kUnsupported,
                "op is " + std::to_string(submission.op) + ": ops 1 (append) to 8 are served");
}

}  // namespace larder::daemon
