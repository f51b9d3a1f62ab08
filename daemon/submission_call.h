// Private to the executor: one call from a ring under examination, and what every op checks.
//
// The record has been copied to private memory. Tables are copied before they are looked at, since
// the client may change the arena meanwhile; tensors, masks and outputs are data, and stay there.
#pragma once

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "allocator/owner_word.h"
#include "daemon/submission.h"
#include "kernels/run_on.h"
#include "protocol/limits.h"

namespace larder::daemon {

inline Status invalid(std::string message) {
  return {ErrorCode::kInvalidArgument, std::move(message)};
}

class SubmissionCall {
 public:
  SubmissionCall(const protocol::Submission& submission, const protocol::Arena& session_arena,
                 const MappedGroup& mapped, SessionId session, const Imports& imports)
      : record(submission),
        group(mapped),
        arena_(session_arena),
        session_(session),
        imports_(imports) {}

  // Flags, reserved bytes, layer, signal word.
  Status check_record() const;
  kernels::LayerView layer() const;

  template <typename T>
  Result<std::vector<T>> copy_table(const char* field, const protocol::ArenaArray& array,
                                    int64_t max_count) const {
    const auto bytes = view_bytes(field, array, sizeof(T), max_count);
    if (!bytes) return bytes.status();
    std::vector<T> table(array.count);
    if (!bytes->empty()) std::memcpy(table.data(), bytes->data(), bytes->size());
    return table;
  }
  // `count` elements in the arena's data part, aligned; empty when there are none.
  template <typename T>
  Result<std::span<T>> view_array(const char* field, const protocol::ArenaArray& array,
                                  int64_t max_count) const {
    const auto bytes = view_bytes(field, array, sizeof(T), max_count);
    if (!bytes) return bytes.status();
    if (!bytes->empty() && array.offset_bytes % alignof(T) != 0)
      return invalid(std::string(field) + ": offset " + std::to_string(array.offset_bytes) +
                     " is not a multiple of " + std::to_string(alignof(T)));
    return std::span<T>(reinterpret_cast<T*>(bytes->data()), array.count);
  }
  // A dense tensor in the arena's data part or an import, within the limits of the kernels.
  Result<TensorView> view_tensor(const char* field, const protocol::TensorRecord& tensor,
                                 protocol::ImportPlace place) const;

  // Tables in imports: all of a call's tables, or none. They are used where they lie.
  bool has_device_tables() const;
  template <typename T>
  Result<const T*> device_table(const char* field, const protocol::ArenaArray& array,
                                protocol::ImportPlace place, int64_t max_count) const {
    const auto bytes =
        view_import(field, array.offset_bytes, array.count, sizeof(T), place, max_count);
    if (!bytes) return bytes.status();
    return reinterpret_cast<const T*>(*bytes);
  }
  // What the session may do with blocks, for the kernels to look up.
  kernels::BlockRights rights() const;

  // PERMISSION_DENIED, naming the block, unless it is open in the session, or (may_read) published.
  // The block is in the pool (a bug otherwise). `what` begins the sentence.
  Status may_write(const std::string& what, int64_t block) const;
  Status may_read(const std::string& what, int64_t block) const;

  const protocol::Submission& record;
  const MappedGroup& group;

 private:
  Result<std::byte*> view_import(const char* field, uint64_t offset_bytes, uint64_t count,
                                 size_t element_bytes, protocol::ImportPlace place,
                                 int64_t max_count) const;
  Result<std::span<std::byte>> view_bytes(const char* field, const protocol::ArenaArray& array,
                                          size_t element_bytes, int64_t max_count) const;

  const protocol::Arena& arena_;
  SessionId session_;
  const Imports& imports_;
};

// With the params that do not depend on tables filled in.
Result<SubmissionWork> run_append_device_tables(const SubmissionCall& call,
                                                kernels::AppendParams params);
Result<SubmissionWork> run_gather_device_tables(const SubmissionCall& call,
                                                kernels::GatherParams params);
Result<SubmissionWork> run_attend_device_tables(const SubmissionCall& call,
                                                kernels::AttendParams params);
Status check_attend_device_tables(const SubmissionCall& call);

Result<SubmissionWork> run_append(const SubmissionCall& call);
Result<SubmissionWork> run_gather(const SubmissionCall& call);
Result<SubmissionWork> run_attend(const SubmissionCall& call);
Result<SubmissionWork> run_sparse_attend(const SubmissionCall& call);
Result<SubmissionWork> run_read_pages(const SubmissionCall& call);
Result<SubmissionWork> run_write_pages(const SubmissionCall& call);
Result<SubmissionWork> run_scrub(const SubmissionCall& call);
Result<SubmissionWork> run_checksum(const SubmissionCall& call);

}  // namespace larder::daemon
