// Memory of the engine that its calls on request use where it lies, and their order after its work.
#include <array>

#include "client/client_impl.h"

namespace larder {
namespace {

// The word that a stream of the engine writes, and the executor waits for.
constexpr uint32_t kStreamWord = 0;

constexpr std::array<const char*, 3> kKindNames = {"memfd", "vmm", "cuda_ipc"};

bool is_dense(const TensorView& tensor) {
  const auto& [rows, heads, dim] = tensor.shape;
  return tensor.strides == std::array<int64_t, 3>{heads * dim, dim, 1};
}

}  // namespace

Result<uint64_t> Client::import_memory(const MemoryImport& memory) {
  if (memory.base == nullptr || memory.size_bytes <= 0 || memory.offset_bytes < 0)
    return Status(ErrorCode::kInvalidArgument,
                  "base is " + std::string(memory.base == nullptr ? "null" : "there") +
                      ", size_bytes " + std::to_string(memory.size_bytes) + ", offset_bytes " +
                      std::to_string(memory.offset_bytes) + ": expected memory of this process");
  protocol::RegisterImport request;
  request.size_bytes = static_cast<uint64_t>(memory.size_bytes);
  request.offset_bytes = static_cast<uint64_t>(memory.offset_bytes);
  request.kind = kKindNames[static_cast<size_t>(memory.kind)];
  std::vector<int> fds;
  if (memory.kind == ImportKind::kCudaIpc)
    request.handle.assign(reinterpret_cast<const char*>(memory.handle.data()),
                          memory.handle.size());
  else
    fds.push_back(memory.fd);
  auto answer = impl_->session->call(std::move(request), Session::Patience::kCall, fds);
  if (!answer) return answer.status();
  const auto* imported = std::get_if<protocol::Imported>(&answer->body);
  if (imported == nullptr)
    return Status(ErrorCode::kInternal, "the daemon answered with a reply of kind " +
                                            std::to_string(answer->body.index()));
  impl_->imports.emplace(imported->import_id, memory);
  return imported->import_id;
}

Status Client::drop_import(uint64_t import_id) {
  if (impl_->ring)
    if (Status status = impl_->start_ring(impl_->deadline()); !status.ok()) return status;
  Status status =
      impl_->session->call_for<protocol::Done>(protocol::DropImport{import_id}).status();
  impl_->imports.erase(import_id);
  return status;
}

Status Client::order_after(void* stream) {
  if (!impl_->ring)
    return {ErrorCode::kInvalidArgument, "arena_bytes is 0, so there are no calls on request"};
  if (impl_->ring_device == kHostDevice)
    return {ErrorCode::kUnsupported,
            "the session's calls on request run on host memory: open a pool on the GPU first"};
  auto calls = kernels::DeviceCalls::create(impl_->ring_device, stream);
  if (!calls) return calls.status();
  const std::span<std::byte> arena = impl_->ring->memory();
  auto registered =
      (*calls)->register_host_memory(arena.data(), static_cast<int64_t>(arena.size()));
  if (!registered) return registered.status();
  impl_->ordered_arena = std::move(*registered);
  impl_->ordering = std::move(*calls);
  impl_->ordered_stream = stream;
  impl_->last_point = impl_->ring->word(kStreamWord).load(std::memory_order_acquire);
  return {};
}

std::optional<std::pair<protocol::TensorRecord, uint32_t>> Client::Impl::find_import(
    const TensorView& tensor, int64_t first, int64_t count) const {
  if (imports.empty() || !is_dense(tensor) || tensor.data == nullptr) return std::nullopt;
  const int64_t row_bytes = tensor.shape[1] * tensor.shape[2] * dtype_bytes(tensor.dtype);
  const auto begin =
      reinterpret_cast<uintptr_t>(tensor.data) + static_cast<uintptr_t>(first * row_bytes);
  const auto bytes = static_cast<uintptr_t>(count * row_bytes);
  for (const auto& [id, memory] : imports) {
    const auto base = reinterpret_cast<uintptr_t>(memory.base);
    const auto size = static_cast<uintptr_t>(memory.size_bytes);
    if (begin < base || begin - base > size || bytes > size - (begin - base)) continue;
    protocol::TensorRecord record;
    record.memory = static_cast<uint32_t>(protocol::TensorMemory::kImport);
    record.dtype = static_cast<uint32_t>(tensor.dtype);
    record.offset_bytes = begin - base;
    record.shape = {count, tensor.shape[1], tensor.shape[2]};
    record.strides = tensor.strides;
    return std::pair(record, static_cast<uint32_t>(id));
  }
  return std::nullopt;
}

Status Client::Impl::check_copied(const TensorView& tensor) const {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  for (const auto& [id, memory] : imports) {
    const auto base = reinterpret_cast<uintptr_t>(memory.base);
    if (memory.kind == ImportKind::kMemfd || begin < base ||
        begin - base >= static_cast<uintptr_t>(memory.size_bytes))
      continue;
    return {ErrorCode::kInvalidArgument,
            "a tensor begins in import " + std::to_string(id) +
                ", memory of a GPU: expected one of append, attend or sparse_attend that is dense "
                "and lies in it whole"};
  }
  return {};
}

Result<protocol::TensorRecord> Client::Impl::place_input(protocol::Submission& record,
                                                         protocol::ImportPlace place,
                                                         const TensorView& tensor, int64_t first,
                                                         int64_t count) {
  const auto found = find_import(tensor, first, count);
  if (!found) {
    if (Status status = check_copied(tensor); !status.ok()) return status;
    return ring->stage_rows(tensor, first, count);
  }
  record.imports[static_cast<size_t>(place)] = found->second;
  return found->first;
}

Result<protocol::TensorRecord> Client::Impl::place_output(protocol::Submission& record,
                                                          protocol::ImportPlace place,
                                                          const TensorView& tensor) {
  const auto found = find_import(tensor, 0, tensor.shape[0]);
  if (!found) {
    if (Status status = check_copied(tensor); !status.ok()) return status;
    return ring->reserve_output(tensor);
  }
  record.imports[static_cast<size_t>(place)] = found->second;
  return found->first;
}

// Host words, polled by the executor's CPU: nothing is enqueued that waits, so a death of either
// side blocks no stream.
Status Client::Impl::run(protocol::Submission record,
                         std::chrono::steady_clock::time_point deadline) {
  if (ordering != nullptr) {
    record.wait_word = kStreamWord;
    record.wait_value = ++last_point;
    auto* word = reinterpret_cast<uint64_t*>(&ring->word(kStreamWord));
    if (Status status = ordering->write_word(ordered_stream, word, last_point); !status.ok())
      return status;
  }
  return ring->run(record, deadline);
}

}  // namespace larder
