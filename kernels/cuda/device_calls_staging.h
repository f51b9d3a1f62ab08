// Private to kernels/cuda: which memory of a call has to be staged, and the copies.
#pragma once

#include <array>
#include <cuda_runtime_api.h>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/cuda/device_calls_rows.h"
#include "larder/paged_kv.h"
#include "larder/status.h"

namespace larder::kernels::cuda {

enum class Way : uint8_t { kIn, kInOut, kOut };

struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};

// The memory of one call. Every function that takes a reference to a pointer or a view changes it:
// at once to the address that the device uses, or in `set_scratch` to one in device scratch, where
// a dense copy of its elements goes. The first refusal is kept in status(), and what follows it
// does nothing.
class StagedCall {
 public:
  explicit StagedCall(int device) : device_(device) {}
  StagedCall(const StagedCall&) = delete;  // holds references
  StagedCall& operator=(const StagedCall&) = delete;

  // Refuses an array that the host cannot read.
  StagedCall& needs_host(std::string_view field, const void* array);

  // A host array, copied wherever it lies.
  template <typename T>
  void table(std::string_view field, const T*& array, int64_t count) {
    if (array != nullptr)
      stage(field, rows_of(bytes_of(array), bytes_of<T>(count)), Way::kIn, setter(array));
  }
  // Bytes on the host, copied wherever they lie.
  void bytes(std::string_view field, const void*& array, int64_t size_bytes) {
    stage(field, rows_of(bytes_of(array), size_bytes), Way::kIn,
          [&array](std::byte* device) { array = device; });
  }
  // An array anywhere; null or without elements: nothing is done.
  template <typename T>
  void array(std::string_view field, Way way, T*& array, int64_t count) {
    if (array == nullptr || count == 0 || !status_.ok()) return;
    const int64_t bytes = bytes_of<T>(count);
    if (std::byte* device = on_device(field, bytes_of(array), bytes); device != nullptr)
      setter(array)(device);
    else
      stage(field, rows_of(bytes_of(array), bytes), way, setter(array));
  }
  void tensor(std::string_view field, Way way, TensorView& view);
  // An output of which only these rows are written.
  void tensor_rows(std::string_view field, TensorView& view, std::span<const RowRange> written);
  // `row_bytes` per row of the region; the geometry says how many rows.
  void paged_rows(std::string_view field, Way way, PagedRows& rows, const PagedKv& paged,
                  int64_t row_bytes);

  const Status& status() const { return status_; }

  // The address by which the device can use all of the bytes; nullptr: there is none.
  const void* device_address(std::string_view field, const void* first, int64_t size_bytes) {
    return on_device(field, bytes_of(first), size_bytes);
  }

  // Gives everything its place. Of the scratch, [0, upload_end) is to be filled from the pieces of
  // `uploads`, and [download_begin, scratch_bytes) goes to those of `downloads`.
  struct Piece {
    HostRows rows;
    int64_t offset_bytes = 0;
    int64_t size_bytes = 0;
  };
  struct Plan {
    std::vector<Piece> uploads;
    std::vector<Piece> downloads;
    int64_t upload_end = 0;
    int64_t download_begin = 0;
    int64_t scratch_bytes = 0;
  };
  Plan make_plan();
  // After make_plan.
  void set_scratch(std::byte* scratch);

 private:
  using Set = std::function<void(std::byte*)>;
  struct Item {
    std::string_view field;
    Way way = Way::kIn;
    Set set;
    std::vector<Piece> pieces;  // offsets within the item
    int64_t size_bytes = 0;
    int64_t offset_bytes = 0;
  };

  static std::byte* bytes_of(const void* array) {
    return const_cast<std::byte*>(static_cast<const std::byte*>(array));
  }
  // Past 64 bits: refused by stage.
  template <typename T>
  static int64_t bytes_of(int64_t count) {
    const CheckedInt64 bytes = CheckedInt64(count) * int64_t{sizeof(T)};
    return bytes.fits ? bytes.value : -1;
  }
  template <typename T>
  static Set setter(T*& array) {
    return [&array](std::byte* device) { array = reinterpret_cast<T*>(device); };
  }
  // See device_address.
  std::byte* on_device(std::string_view field, std::byte* first, int64_t bytes);
  void stage(std::string_view field, const HostRows& rows, Way way, Set set);

  int device_;
  std::vector<Item> items_;
  Status status_;
};

// Pinned memory and device scratch, which grow as calls need them.
class Stager {
 public:
  Stager() = default;
  Stager(const Stager&) = delete;
  Stager& operator=(const Stager&) = delete;

  // Gives the call its scratch and copies what goes to the device.
  Status send(StagedCall& call, cudaStream_t stream);
  // Nothing is under way in the stream, and the device is current.
  void release();
  // After the kernel: copies what comes back and waits for it, if anything does.
  Status fetch(cudaStream_t stream);

 private:
  struct Pinned {
    std::byte* data = nullptr;
    int64_t size_bytes = 0;
    cudaEvent_t used = nullptr;  // its last copy
  };
  Status reserve_scratch(int64_t bytes, cudaStream_t stream);
  // Waits until no copy uses it, and makes it large enough.
  static Status make_ready(Pinned& pinned, int64_t bytes);
  Status send_part(int64_t begin, int64_t end, cudaStream_t stream);

  std::array<Pinned, 2> there_;  // taken in turn
  size_t turn_ = 0;
  Pinned back_;
  std::byte* scratch_ = nullptr;
  int64_t scratch_bytes_ = 0;
  StagedCall::Plan plan_;
};

// RESOURCE_EXHAUSTED with the sizes when memory is what lacks, else INTERNAL.
Status allocation_failed(std::string_view what, int64_t bytes, cudaError_t error);

}  // namespace larder::kernels::cuda
