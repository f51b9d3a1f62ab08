// The executor on a GPU: its memory, what of the host the GPU must see, and memory of clients.
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <sys/stat.h>

#include "allocator/cuda_error.h"
#include "allocator/host_memory.h"
#include "daemon/executor.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

constexpr int64_t kPageBytes = 4096;

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

template <typename T>
T value_or_throw(Result<T> result, const std::string& what) {
  if (!result) throw std::runtime_error(what + ": " + result.status().to_string());
  return std::move(*result);
}

// Host memory that its owner cannot shrink under us.
Status check_memfd(int fd, uint64_t needed_bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    return {ErrorCode::kInvalidArgument, "the fd is no memfd with F_SEAL_SHRINK"};
  struct stat about {};
  if (::fstat(fd, &about) != 0) throw SystemError("fstat(import)");
  if (about.st_size > 0 && static_cast<uint64_t>(about.st_size) >= needed_bytes) return {};
  return {ErrorCode::kInvalidArgument, "the memfd has " + std::to_string(about.st_size) +
                                           " bytes, offset and size say " +
                                           std::to_string(needed_bytes)};
}

Result<ImportedMemory> import_memfd(const protocol::RegisterImport& memory, int fd,
                                    kernels::DeviceCalls* device) {
  const uint64_t end = memory.offset_bytes + memory.size_bytes;
  if (Status status = check_memfd(fd, end); !status.ok()) return status;
  ImportedMemory result;
  result.on_host = true;
  result.host = SharedMapping::map(fd, round_up(static_cast<int64_t>(end), kPageBytes), true);
  std::byte* base = result.host.data();
  if (device != nullptr) {
    auto registered = device->register_host_memory(base, result.host.size_bytes());
    if (!registered) return registered.status();
    result.registered = std::move(*registered);
    base = result.registered.on_device;
  }
  result.base = base + memory.offset_bytes;
  return result;
}

Result<ImportedMemory> import_vmm(const protocol::RegisterImport& memory, int fd,
                                  const MemoryProvider& provider) {
  const auto end = static_cast<int64_t>(memory.offset_bytes + memory.size_bytes);
  const int64_t mapped_bytes = round_up(end, provider.granularity_bytes());
  if (Status status = provider.check(fd, mapped_bytes); !status.ok()) return status;
  ImportedMemory result;
  result.range = provider.reserve(mapped_bytes);
  result.range->map_at(0, fd, mapped_bytes);
  result.base = result.range->base() + memory.offset_bytes;
  return result;
}

Result<ImportedMemory> import_ipc(const protocol::RegisterImport& memory,
                                  kernels::DeviceCalls& device) {
  kernels::IpcHandle handle;
  std::memcpy(handle.data(), memory.handle.data(), handle.size());
  auto opened =
      device.open_ipc_memory(handle, static_cast<int64_t>(memory.offset_bytes + memory.size_bytes));
  if (!opened) return opened.status();
  ImportedMemory result;
  result.ipc = std::move(*opened);
  result.base = result.ipc.memory.get() + memory.offset_bytes;
  return result;
}

Result<ImportedMemory> import_memory(const protocol::RegisterImport& memory,
                                     const std::vector<OwnFd>& fds, const MemoryProvider& provider,
                                     kernels::DeviceCalls* device) {
  const bool has_fd = memory.kind != "cuda_ipc";
  if (has_fd && fds.size() != 1)
    return Status(ErrorCode::kInvalidArgument, std::to_string(fds.size()) + " fds, not one");
  if (memory.kind != "memfd" && device == nullptr)
    return Status(ErrorCode::kUnsupported, "kind is " + memory.kind +
                                               ", and the session's pools are host memory: open a "
                                               "pool on the GPU first");
  try {
    auto imported = memory.kind == "memfd" ? import_memfd(memory, fds[0].get(), device)
                    : has_fd               ? import_vmm(memory, fds[0].get(), provider)
                                           : import_ipc(memory, *device);
    if (imported) imported->size_bytes = memory.size_bytes;
    return imported;
  } catch (const std::runtime_error& error) {  // SystemError, CudaError
    return Status(ErrorCode::kInvalidArgument, error.what());
  }
}

}  // namespace

void Executor::use_device(const std::string& device) {
  if (!device.empty()) {
    device_ = value_or_throw(kernels::DeviceCalls::create(device), "device " + device);
    faults_ = SharedMapping::map(create_host_segment("larder-faults", kPageBytes).fd.get(),
                                 kPageBytes, true);
    device_faults_ = value_or_throw(
        device_->register_host_memory(faults_.data(), faults_.size_bytes()), "faults");
  }
  memory_ = value_or_throw(devices_.provider(device.empty() ? kHostDevice : device),
                           "memory of " + device);
}

void Executor::prepare_for_device(MappedGroup& group) {
  group.device_owners = value_or_throw(
      device_->register_host_memory(group.owners.data(), group.owners.size_bytes()), "owners");
  if (!group.view.key_offsets.empty())
    group.device_key_offsets =
        value_or_throw(device_->copy_to_device(
                           group.view.key_offsets.data(),
                           static_cast<int64_t>(group.view.key_offsets.size() * sizeof(float))),
                       "key offsets");
  group.faults = reinterpret_cast<kernels::CallFaults*>(faults_.data());
  group.device_faults = reinterpret_cast<kernels::CallFaults*>(device_faults_.on_device);
}

void Executor::prepare_for_device(Ring& ring) {
  ring.registered = value_or_throw(
      device_->register_host_memory(ring.mapping.data(), ring.mapping.size_bytes()), "arena");
}

void Executor::check_device() const {
  if (device_ != nullptr && device_->is_dead())
    throw std::runtime_error("the context on the GPU is lost: " + device_->wait().to_string());
}

void Executor::handle(const protocol::AddImport& command, const std::vector<OwnFd>& fds) {
  const auto ring = rings_.find(command.session);
  if (ring == rings_.end()) return;
  auto imported = import_memory(command.memory, fds, memory(), device_.get());
  check_device();
  const Status status = imported ? Status() : imported.status();
  if (imported) ring->second->imports.insert_or_assign(command.import_id, std::move(*imported));
  report(protocol::ImportDone{command.session, command.import_id, status});
}

void Executor::handle(const protocol::RemoveImport& command) {
  const auto ring = rings_.find(command.session);
  if (ring != rings_.end()) ring->second->imports.erase(command.import_id);
}

}  // namespace larder::daemon
