#include "kernels/cuda/device_calls_staging.h"

#include <utility>

#include "kernels/cuda/launch.h"
#include "kernels/refuse.h"

namespace larder::kernels::cuda {
namespace {

constexpr int64_t kAlignment = 256;           // of items in scratch
constexpr int64_t kPinnedBytes = 32ll << 20;  // the most that one copy moves
constexpr int64_t kLeastPinnedBytes = 64ll << 10;
constexpr int64_t kKeptScratchBytes = 256ll << 20;  // more is given back after the call
// So that the end of the last item, rounded up, cannot overflow; no device has as much.
constexpr int64_t kMaxScratchBytes = int64_t{1} << 50;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

cudaPointerAttributes attributes_of(const void* pointer) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    (void)cudaGetLastError();
    attributes.type = cudaMemoryTypeUnregistered;
  }
  return attributes;
}

}  // namespace

Status allocation_failed(std::string_view what, int64_t bytes, cudaError_t error) {
  if (error != cudaErrorMemoryAllocation) return to_status(what, error);
  (void)cudaGetLastError();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  (void)cudaMemGetInfo(&free_bytes, &total_bytes);
  return refuse(ErrorCode::kResourceExhausted, what, ": ", bytes,
                " bytes are needed; the device has ", free_bytes, " of ", total_bytes,
                " bytes free");
}

StagedCall& StagedCall::needs_host(std::string_view field, const void* array) {
  if (array == nullptr || !status_.ok()) return *this;
  if (attributes_of(array).type == cudaMemoryTypeDevice)
    status_ = refuse(ErrorCode::kInvalidArgument, field,
                     " lies in device memory: expected host memory, or the call that takes tables "
                     "in device memory");
  return *this;
}

std::byte* StagedCall::on_device(std::string_view field, std::byte* first, int64_t bytes) {
  if (bytes < 0) return nullptr;
  const cudaPointerAttributes begin = attributes_of(first);
  const cudaPointerAttributes last = attributes_of(first + bytes - 1);
  const bool both = begin.type == last.type;
  if (begin.type == cudaMemoryTypeDevice || last.type == cudaMemoryTypeDevice) {
    const int device = begin.type == cudaMemoryTypeDevice ? begin.device : last.device;
    if (!both)
      status_ = refuse(ErrorCode::kInvalidArgument, field, ": its ", bytes,
                       " bytes lie in memory of device ", device, " only in part");
    else if (begin.device != device_ || last.device != device_)
      status_ = refuse(ErrorCode::kInvalidArgument, field, " lies in memory of device ", device,
                       ": expected that of device ", device_, ", or host memory");
    return first;
  }
  if (both && begin.type == cudaMemoryTypeManaged) return first;
  if (!both || begin.type != cudaMemoryTypeHost || begin.devicePointer == nullptr) return nullptr;
  auto* device_first = static_cast<std::byte*>(begin.devicePointer);
  // Two registrations next to each other need not be so on the device.
  return last.devicePointer == device_first + (bytes - 1) ? device_first : nullptr;
}

void StagedCall::stage(std::string_view field, const HostRows& rows, Way way, Set set) {
  if (!status_.ok()) return;
  const CheckedInt64 bytes = rows.dense_bytes();
  if (!bytes.fits || bytes.value < 0 || bytes.value > kMaxScratchBytes) {
    status_ = refuse(ErrorCode::kResourceExhausted, field, " has more than ", kMaxScratchBytes,
                     " bytes to stage");
    return;
  }
  if (bytes.value == 0) return;
  Item item = {field, way, std::move(set), {}, bytes.value, 0};
  item.pieces.push_back({with_long_runs(rows), 0, bytes.value});
  items_.push_back(std::move(item));
}

void StagedCall::tensor(std::string_view field, Way way, TensorView& view) {
  // Validated: the extent exists.
  const ByteRange extent = tensor_extent_bytes(view).value_or(ByteRange{});
  if (extent.begin == extent.end || !status_.ok()) return;
  std::byte* first = static_cast<std::byte*>(view.data) + extent.begin;
  if (std::byte* device = on_device(field, first, extent.end - extent.begin); device != nullptr) {
    view.data = device - extent.begin;
    return;
  }
  stage(field, rows_of(view), way, [&view](std::byte* scratch) {
    view = dense_tensor(scratch, view.dtype, view.shape[0], view.shape[1], view.shape[2]);
  });
}

void StagedCall::tensor_rows(std::string_view field, TensorView& view,
                             std::span<const RowRange> written) {
  const TensorView host = view;
  const size_t before = items_.size();
  tensor(field, Way::kOut, view);
  if (items_.size() == before) return;
  Item& item = items_.back();
  item.pieces.clear();
  const int64_t row_bytes = item.size_bytes / host.shape[0];
  for (const RowRange& range : written) {
    TensorView rows = host;
    rows.data = static_cast<std::byte*>(host.data) +
                (host.shape[0] == 1 ? 0 : range.first * host.strides[0] * dtype_bytes(host.dtype));
    rows.shape[0] = range.count;
    item.pieces.push_back(
        {with_long_runs(rows_of(rows)), range.first * row_bytes, range.count * row_bytes});
  }
}

void StagedCall::paged_rows(std::string_view field, Way way, PagedRows& rows, const PagedKv& paged,
                            int64_t row_bytes) {
  if (row_bytes == 0 || paged.num_pages == 0 || !status_.ok()) return;
  const int64_t heads = paged.geometry.num_kv_heads;
  const int64_t tokens = paged.geometry.block_tokens;
  HostRows host = {rows.base, {paged.num_pages, heads, tokens}, {}, row_bytes};
  const std::array<int64_t, 3> strides = {rows.page_stride_bytes, rows.head_stride_bytes,
                                          rows.token_stride_bytes};
  // Strides are not negative, and validated to stay within 63 bits where they are used.
  int64_t extent = row_bytes;
  for (size_t axis = 0; axis < 3; ++axis) {
    if (host.counts[axis] == 1) continue;
    host.strides_bytes[axis] = strides[axis];
    extent += (host.counts[axis] - 1) * strides[axis];
  }
  if (std::byte* device = on_device(field, rows.base, extent); device != nullptr) {
    rows.base = device;
    return;
  }
  stage(field, host, way, [&rows, heads, tokens, row_bytes](std::byte* scratch) {
    rows = {scratch, heads * tokens * row_bytes, tokens * row_bytes, row_bytes};
  });
}

StagedCall::Plan StagedCall::make_plan() {
  Plan plan;
  int64_t end = 0;
  for (const Way way : {Way::kIn, Way::kInOut, Way::kOut}) {
    if (way == Way::kInOut) plan.download_begin = end;
    if (way == Way::kOut) plan.upload_end = end;
    for (Item& item : items_) {
      if (item.way != way) continue;
      item.offset_bytes = end;
      end = round_up(end + item.size_bytes, kAlignment);
      for (const Piece& piece : item.pieces) {
        const Piece placed = {piece.rows, item.offset_bytes + piece.offset_bytes, piece.size_bytes};
        if (way != Way::kOut) plan.uploads.push_back(placed);
        if (way != Way::kIn) plan.downloads.push_back(placed);
      }
    }
  }
  plan.scratch_bytes = end;
  return plan;
}

void StagedCall::set_scratch(std::byte* scratch) {
  for (const Item& item : items_) item.set(scratch + item.offset_bytes);
}

namespace {

// The bytes of the pieces that lie in [begin, end) of the scratch; `pinned` is where `begin` lies.
template <bool kToRows>
void copy_pieces(const std::vector<StagedCall::Piece>& pieces, int64_t begin, int64_t end,
                 std::byte* pinned) {
  for (const StagedCall::Piece& piece : pieces) {
    const int64_t first = std::max(begin, piece.offset_bytes);
    const int64_t last = std::min(end, piece.offset_bytes + piece.size_bytes);
    if (first < last)
      copy_rows<kToRows>(piece.rows, first - piece.offset_bytes, last - piece.offset_bytes,
                         pinned + (first - begin));
  }
}

}  // namespace

void Stager::release() {
  for (const Pinned& pinned : {there_[0], there_[1], back_}) {
    if (pinned.used != nullptr) (void)cudaEventDestroy(pinned.used);
    if (pinned.data != nullptr) (void)cudaFreeHost(pinned.data);
  }
  if (scratch_ != nullptr) (void)cudaFree(scratch_);
}

Status Stager::reserve_scratch(int64_t bytes, cudaStream_t stream) {
  if (bytes <= scratch_bytes_) return {};
  if (Status s = to_status("staging", cudaStreamSynchronize(stream)); !s.ok()) return s;
  if (scratch_ != nullptr) (void)cudaFree(scratch_);
  scratch_ = nullptr;
  scratch_bytes_ = 0;
  // Past what is kept there is no use in room for the next call.
  const int64_t size = bytes > kKeptScratchBytes
                           ? bytes
                           : std::min(kKeptScratchBytes, round_up(bytes + bytes / 2, 1 << 20));
  void* memory = nullptr;
  if (const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(size));
      error != cudaSuccess)
    return allocation_failed("staging on the device", size, error);
  scratch_ = static_cast<std::byte*>(memory);
  scratch_bytes_ = size;
  return {};
}

Status Stager::make_ready(Pinned& pinned, int64_t bytes) {
  if (pinned.used == nullptr) {
    cudaEvent_t used = nullptr;
    if (Status s = to_status("staging", cudaEventCreateWithFlags(&used, cudaEventDisableTiming));
        !s.ok())
      return s;
    pinned.used = used;
  }
  if (Status s = to_status("staging", cudaEventSynchronize(pinned.used)); !s.ok()) return s;
  if (bytes <= pinned.size_bytes) return {};
  if (pinned.data != nullptr) (void)cudaFreeHost(pinned.data);
  pinned.data = nullptr;
  pinned.size_bytes = 0;
  int64_t size = kLeastPinnedBytes;
  while (size < bytes) size *= 2;
  void* memory = nullptr;
  if (const cudaError_t error =
          cudaHostAlloc(&memory, static_cast<size_t>(size), cudaHostAllocPortable);
      error != cudaSuccess)
    return allocation_failed("staging in pinned host memory", size, error);
  pinned.data = static_cast<std::byte*>(memory);
  pinned.size_bytes = size;
  return {};
}

Status Stager::send_part(int64_t begin, int64_t end, cudaStream_t stream) {
  Pinned& pinned = there_[turn_++ % there_.size()];
  if (Status s = make_ready(pinned, end - begin); !s.ok()) return s;
  copy_pieces<false>(plan_.uploads, begin, end, pinned.data);
  if (Status s = to_status("copy to the device", cudaMemcpyAsync(scratch_ + begin, pinned.data,
                                                                 static_cast<size_t>(end - begin),
                                                                 cudaMemcpyHostToDevice, stream));
      !s.ok())
    return s;
  Status recorded = to_status("staging", cudaEventRecord(pinned.used, stream));
  // Without the event nobody would know when the memory is free again.
  if (!recorded.ok()) (void)cudaStreamSynchronize(stream);
  return recorded;
}

Status Stager::send(StagedCall& call, cudaStream_t stream) {
  plan_ = call.make_plan();
  if (plan_.scratch_bytes == 0) return {};
  if (Status s = reserve_scratch(plan_.scratch_bytes, stream); !s.ok()) return s;
  // Now, since a call that has run can no longer be refused.
  if (!plan_.downloads.empty()) {
    const int64_t bytes = std::min(kPinnedBytes, plan_.scratch_bytes - plan_.download_begin);
    if (Status s = make_ready(back_, bytes); !s.ok()) return s;
  }
  call.set_scratch(scratch_);
  for (int64_t begin = 0; begin < plan_.upload_end; begin += kPinnedBytes) {
    const int64_t end = std::min(begin + kPinnedBytes, plan_.upload_end);
    if (Status s = send_part(begin, end, stream); !s.ok()) return s;
  }
  return {};
}

Status Stager::fetch(cudaStream_t stream) {
  const int64_t download_end = plan_.downloads.empty() ? 0 : plan_.scratch_bytes;
  for (int64_t begin = plan_.download_begin; begin < download_end; begin += kPinnedBytes) {
    const int64_t end = std::min(begin + kPinnedBytes, download_end);
    if (Status s =
            to_status("copy from the device", cudaMemcpyAsync(back_.data, scratch_ + begin,
                                                              static_cast<size_t>(end - begin),
                                                              cudaMemcpyDeviceToHost, stream));
        !s.ok())
      return s;
    if (Status s = to_status("the call", cudaStreamSynchronize(stream)); !s.ok()) return s;
    copy_pieces<true>(plan_.downloads, begin, end, back_.data);
  }
  if (plan_.scratch_bytes <= kKeptScratchBytes) return {};
  if (Status s = to_status("the call", cudaStreamSynchronize(stream)); !s.ok()) return s;
  (void)cudaFree(scratch_);
  scratch_ = nullptr;
  scratch_bytes_ = 0;
  return {};
}

}  // namespace larder::kernels::cuda
