#include "daemon/submission.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "allocator/owner_word.h"
#include "kernels/kernel_table.h"
#include "kernels/visible.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

Status invalid(std::string message) { return {ErrorCode::kInvalidArgument, std::move(message)}; }

// A private copy of a table. The client may change the arena meanwhile, so nothing is read twice.
template <typename T>
Result<std::vector<T>> copy_table(const char* field, const protocol::Arena& arena,
                                  const protocol::ArenaArray& array, int64_t max_count) {
  if (array.count > static_cast<uint64_t>(max_count))
    return invalid(std::string(field) + " has " + std::to_string(array.count) +
                   " entries, at most " + std::to_string(max_count) + " are allowed");
  const uint64_t bytes = array.count * sizeof(T);
  if (bytes > 0 && !arena.holds(array.offset_bytes, bytes))
    return invalid(std::string(field) + ": " + std::to_string(bytes) + " bytes at offset " +
                   std::to_string(array.offset_bytes) + " are not in the arena's data part");
  std::vector<T> table(array.count);
  if (bytes > 0) std::memcpy(table.data(), arena.memory().data() + array.offset_bytes, bytes);
  return table;
}

Result<TensorView> view_tensor(const char* field, const protocol::Arena& arena,
                               const protocol::TensorRecord& record) {
  if (record.memory != static_cast<uint32_t>(protocol::TensorMemory::kArena))
    return Status(ErrorCode::kUnsupported, std::string(field) + ".memory is " +
                                               std::to_string(record.memory) +
                                               ": tensors in the arena (0) are served");
  if (record.dtype >= kDtypeNames.size())
    return invalid(std::string(field) + ".dtype is " + std::to_string(record.dtype) +
                   ", known are 0 to " + std::to_string(kDtypeNames.size() - 1));
  TensorView view;
  view.dtype = static_cast<Dtype>(record.dtype);
  view.shape = record.shape;
  view.strides = record.strides;
  const auto extent = tensor_extent_bytes(view);
  const auto offset = static_cast<int64_t>(record.offset_bytes);
  if (!extent || offset < 0 || offset % dtype_bytes(view.dtype) != 0)
    return invalid(std::string(field) + ": shape, strides or offset " +
                   std::to_string(record.offset_bytes) + " make no sense");
  int64_t begin = 0;
  if (__builtin_add_overflow(offset, extent->begin, &begin) || begin < 0 ||
      !arena.holds(static_cast<uint64_t>(begin),
                   static_cast<uint64_t>(extent->end) - static_cast<uint64_t>(extent->begin)))
    return invalid(std::string(field) + ": bytes " + std::to_string(extent->begin) + " to " +
                   std::to_string(extent->end) + " around offset " +
                   std::to_string(record.offset_bytes) + " are not in the arena's data part");
  view.data = arena.memory().data() + offset;
  return view;
}

uint64_t owner_of(const MappedGroup& group, int64_t block) {
  auto* words = reinterpret_cast<uint64_t*>(group.owners.data());
  return std::atomic_ref(words[block]).load(std::memory_order_acquire);
}

// The numbers have been validated: every slot is in the pool.
Status check_slots(const MappedGroup& group, SessionId session, const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots) {
    if (slot < 0) continue;
    const int64_t block = slot / group.view.geometry.block_tokens;
    if (!may_append(owner_of(group, block), session))
      return {ErrorCode::kPermissionDenied, "slot " + std::to_string(slot) + ": block " +
                                                std::to_string(block) +
                                                " is not open in this session"};
  }
  return {};
}

Status check_blocks(const MappedGroup& group, SessionId session,
                    const kernels::AttendParams& params) {
  const int64_t block_tokens = group.view.geometry.block_tokens;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const auto keys = kernels::touched_keys(params.causal, params.window_left,
                                            params.q_lens[sequence], params.seq_lens[sequence]);
    for (int64_t column = keys.begin / block_tokens; column * block_tokens < keys.end; ++column) {
      const int32_t block = params.block_table[sequence * params.block_table_stride + column];
      if (!may_attend(owner_of(group, block), session))
        return {ErrorCode::kPermissionDenied, "sequence " + std::to_string(sequence) + ": block " +
                                                  std::to_string(block) +
                                                  " is neither published nor open in this session"};
    }
  }
  return {};
}

// What a client could ask for without end: rows that lie on top of each other, or keys that repeat.
Status check_attend_size(const protocol::Submission& submission, const MappedGroup& group,
                         const kernels::AttendParams& params) {
  const auto& [rows, heads, dim] = submission.second.shape;
  if (rows > protocol::kMaxRowsPerCall)
    return invalid("q has " + std::to_string(rows) + " rows, at most " +
                   std::to_string(protocol::kMaxRowsPerCall) + " go in one call");
  if (submission.second.strides != std::array<int64_t, 3>{heads * dim, dim, 1})
    return invalid("out must be dense when attention runs on request");
  // Below 2^20 rows, 2^31 keys and 2^12 heads a double holds the sum well enough to compare.
  double products = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const auto keys = kernels::touched_keys(params.causal, params.window_left,
                                            params.q_lens[sequence], params.seq_lens[sequence]);
    products += static_cast<double>(params.q_lens[sequence]) *
                static_cast<double>(std::max<int64_t>(keys.end - keys.begin, 0));
  }
  const AttentionGeometry& geometry = group.view.geometry;
  products *= static_cast<double>(heads) * (geometry.k_dim + geometry.v_dim);
  if (products > static_cast<double>(protocol::kMaxAttendProductsPerCall))
    return invalid("the attention has " +
                   std::to_string(static_cast<int64_t>(std::min(products, 9e18))) +
                   " products (rows * keys * heads * dims), at most " +
                   std::to_string(protocol::kMaxAttendProductsPerCall) +
                   " go in one call: attend fewer rows at a time");
  return {};
}

Status check_record(const protocol::Submission& submission, const MappedGroup& group) {
  if ((submission.flags & ~protocol::kKnownFlags) != 0)
    return invalid("flags is " + std::to_string(submission.flags) + ", known are " +
                   std::to_string(protocol::kKnownFlags));
  if (std::any_of(submission.reserved.begin(), submission.reserved.end(),
                  [](uint8_t byte) { return byte != 0; }))
    return invalid("the record's reserved bytes are not zero");
  if (submission.layer >= static_cast<uint32_t>(group.view.geometry.num_layers))
    return invalid("layer is " + std::to_string(submission.layer) + ", the pool has " +
                   std::to_string(group.view.geometry.num_layers));
  if (submission.signal_word != protocol::kNoWord &&
      submission.signal_word >= protocol::kTimelineWords)
    return invalid("signal_word is " + std::to_string(submission.signal_word) + ", there are " +
                   std::to_string(protocol::kTimelineWords));
  return {};
}

kernels::LayerView layer_of(const protocol::Submission& submission, const MappedGroup& group) {
  return view_layer(group.view, group.layout, group.memory.base(),
                    static_cast<int32_t>(submission.layer));
}

Result<SubmissionWork> run_append(const protocol::Submission& submission,
                                  const protocol::Arena& arena, const MappedGroup& group,
                                  SessionId session) {
  const auto k = view_tensor("k", arena, submission.first);
  if (!k) return k.status();
  const auto v = view_tensor("v", arena, submission.second);
  if (!v) return v.status();
  const auto slots =
      copy_table<int64_t>("slots", arena, submission.slots, protocol::kMaxRowsPerCall);
  if (!slots) return slots.status();
  kernels::AppendParams params;
  params.layer = layer_of(submission, group);
  params.k = *k;
  params.v = *v;
  params.slots = slots->data();
  params.num_slots = static_cast<int64_t>(slots->size());
  if (Status status = kernels::validate_append(params); !status.ok()) return status;
  if (Status status = check_slots(group, session, *slots); !status.ok()) return status;
  if (Status status = kernels::run_append(params); !status.ok()) return status;
  const auto skipped =
      std::count_if(slots->begin(), slots->end(), [](int64_t slot) { return slot < 0; });
  return SubmissionWork{slots->size() - static_cast<uint64_t>(skipped), 0};
}

Result<float*> view_lse(const protocol::Submission& submission, const protocol::Arena& arena,
                        const TensorView& q) {
  if (submission.lse.count == 0) return static_cast<float*>(nullptr);
  // q lies in the arena, so its shape's product fits.
  const uint64_t wanted = static_cast<uint64_t>(q.shape[0]) * static_cast<uint64_t>(q.shape[1]);
  if (submission.lse.count != wanted || submission.lse.offset_bytes % sizeof(float) != 0 ||
      !arena.holds(submission.lse.offset_bytes, wanted * sizeof(float)))
    return invalid("lse has " + std::to_string(submission.lse.count) + " entries at offset " +
                   std::to_string(submission.lse.offset_bytes) + "; " + std::to_string(wanted) +
                   " are needed, in the arena's data part");
  return reinterpret_cast<float*>(arena.memory().data() + submission.lse.offset_bytes);
}

Result<SubmissionWork> run_attend(const protocol::Submission& submission,
                                  const protocol::Arena& arena, const MappedGroup& group,
                                  SessionId session) {
  const auto q = view_tensor("q", arena, submission.first);
  if (!q) return q.status();
  const auto out = view_tensor("out", arena, submission.second);
  if (!out) return out.status();
  const auto lse = view_lse(submission, arena, *q);
  if (!lse) return lse.status();
  const auto q_lens =
      copy_table<int32_t>("q_lens", arena, submission.q_lens, protocol::kMaxSequencesPerCall);
  if (!q_lens) return q_lens.status();
  const auto seq_lens =
      copy_table<int32_t>("seq_lens", arena, submission.seq_lens, protocol::kMaxSequencesPerCall);
  if (!seq_lens) return seq_lens.status();
  const auto table = copy_table<int32_t>("block_table", arena, submission.block_table,
                                         protocol::kMaxTableEntriesPerCall);
  if (!table) return table.status();
  const uint64_t stride = submission.block_table_stride;
  if (q_lens->size() != seq_lens->size() ||
      stride > static_cast<uint64_t>(protocol::kMaxTableEntriesPerCall) ||
      stride * q_lens->size() != table->size())
    return invalid("q_lens has " + std::to_string(q_lens->size()) + " entries, seq_lens " +
                   std::to_string(seq_lens->size()) + ", block_table " +
                   std::to_string(table->size()) + " with a stride of " + std::to_string(stride));
  kernels::AttendParams params;
  params.layer = layer_of(submission, group);
  params.q = *q;
  params.out = *out;
  params.lse = *lse;
  params.q_lens = q_lens->data();
  params.seq_lens = seq_lens->data();
  params.block_table = table->data();
  params.num_seqs = static_cast<int64_t>(q_lens->size());
  params.block_table_stride = static_cast<int64_t>(stride);
  params.scale = submission.scale;
  params.causal = (submission.flags & protocol::kFlagCausal) != 0;
  params.window_left = submission.window_left;
  if (Status status = kernels::validate_attend(params); !status.ok()) return status;
  if (Status status = check_attend_size(submission, group, params); !status.ok()) return status;
  if (Status status = check_blocks(group, session, params); !status.ok()) return status;
  if (Status status = kernels::run_attend(params); !status.ok()) return status;
  return SubmissionWork{0, static_cast<uint64_t>(q->shape[0])};
}

}  // namespace

Result<SubmissionWork> run_submission(const protocol::Submission& submission,
                                      const protocol::Arena& arena, const MappedGroup& group,
                                      SessionId session) {
  if (Status status = check_record(submission, group); !status.ok()) return status;
  switch (static_cast<protocol::Op>(submission.op)) {
    case protocol::Op::kAppend:
      return run_append(submission, arena, group, session);
    case protocol::Op::kAttend:
      return run_attend(submission, arena, group, session);
  }
  return Status(ErrorCode::kUnsupported, "op is " + std::to_string(submission.op) +
                                             ": append (1) and attend (2) are served");
}

}  // namespace larder::daemon
