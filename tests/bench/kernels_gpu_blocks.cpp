// copy, scrub and checksum of whole blocks on a GPU, and copies of whole blocks to and from pinned
// host memory.
#include <array>

#include "kernels/device_calls.h"
#include "tests/bench/gpu_pool.h"

namespace larder::test {
namespace {

using kernels::BlocksView;

constexpr int64_t kCallBytes = 256 * kMiB;  // of the blocks of a large call

std::vector<int32_t> shuffled_ids(int64_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937 engine(13);
  std::shuffle(ids.begin(), ids.end(), engine);
  return ids;
}

// A pool of blocks with random bytes; every call has two lists of its own, `first` and `second`.
class BlocksItem {
 public:
  BlocksItem(int64_t block_bytes, int64_t count, int64_t buffers)
      : count_(count),
        host_ids_(shuffled_ids(2 * count * buffers)),
        memory_(block_bytes * std::ssize(host_ids_)),
        ids_(host_ids_),
        checksums_(buffers * count * 8),
        view_{memory_.data(), block_bytes, block_bytes, block_bytes, 1, std::ssize(host_ids_)} {
    launch_fill(memory_.data(), memory_.bytes(), Fill::kBits, 9, nullptr);
    check(cudaDeviceSynchronize());
  }

  const BlocksView& view() const { return view_; }
  const int32_t* first(int64_t buffer) const { return ids_.as<int32_t>() + 2 * buffer * count_; }
  const int32_t* second(int64_t buffer) const { return first(buffer) + count_; }
  uint64_t* checksums(int64_t buffer) const { return checksums_.as<uint64_t>() + buffer * count_; }
  int64_t count() const { return count_; }

  // Entries of call 0's lists that are checked: the first two and the last two.
  std::vector<int64_t> checked() const {
    if (count_ < 4) return {0};
    return {0, 1, count_ - 2, count_ - 1};
  }
  std::byte* block_at(bool in_second, int64_t entry) const {
    const auto index = static_cast<size_t>(in_second ? count_ + entry : entry);
    return memory_.data() + view_.block_stride_bytes * host_ids_[index];
  }
  std::vector<std::byte> block(bool in_second, int64_t entry) const {
    return to_host(block_at(in_second, entry), view_.layer_bytes);
  }

 private:
  int64_t count_;
  std::vector<int32_t> host_ids_;
  DeviceMemory memory_, ids_, checksums_;
  BlocksView view_;
};

// What the CPU's row would make of one checked entry; the copy's is the source itself.
std::string difference_of(const std::string& op, const BlocksItem& memory) {
  for (const int64_t entry : memory.checked()) {
    const std::string what = "block " + std::to_string(entry) + " of the list";
    std::vector<std::byte> source = memory.block(false, entry);
    std::string text;
    if (op == "copy") {
      text = first_difference(memory.block(true, entry), source, what);
    } else if (op == "scrub") {
      const std::vector<std::byte> zeros(source.size());
      text = first_difference(source, zeros, what);
    } else {
      const int32_t id = 0;
      std::array<std::byte, 8> expected{};
      uint64_t sum = 0;
      const auto size = std::ssize(source);
      must(kernels::run_checksum({{source.data(), size, size, size, 1, 1}, &id, 1, &sum}));
      std::memcpy(expected.data(), &sum, 8);
      text = first_difference(to_host(memory.checksums(0) + entry, 8), expected, what);
    }
    if (!text.empty()) return text;
  }
  return {};
}

Status add_op(const std::string& op, Item& item, const BlocksItem& memory) {
  if (op == "copy") {
    return add_rows(item, kernels::copy_kernels(), [&memory](int64_t buffer) {
      return kernels::CopyParams{memory.view(), memory.first(buffer), memory.second(buffer),
                                 memory.count()};
    });
  }
  if (op == "scrub") {
    return add_rows(item, kernels::scrub_kernels(), [&memory](int64_t buffer) {
      return kernels::ScrubParams{memory.view(), memory.first(buffer), memory.count()};
    });
  }
  return add_rows(item, kernels::checksum_kernels(), [&memory](int64_t buffer) {
    return kernels::ChecksumParams{memory.view(), memory.first(buffer), memory.count(),
                                   memory.checksums(buffer)};
  });
}

void blocks_case(Bench& bench, const std::string& op, int64_t block_bytes, int64_t count) {
  Item item;
  item.label = op + "/" + std::to_string(block_bytes) + "/" + std::to_string(count);
  if (!bench.wants(item.label)) return;
  item.fields = {{"op", op}, {"block_bytes", block_bytes}, {"blocks", count}};
  item.bytes_read = op == "scrub" ? 0 : block_bytes * count;
  item.bytes_written = op == "checksum" ? 8 * count : block_bytes * count;
  item.buffers = buffers_for(item.bytes_read + item.bytes_written);
  const BlocksItem memory(block_bytes, count, item.buffers);
  if (Status status = add_op(op, item, memory); !status.ok())
    return bench.skip(item.label, item.fields, status);
  // Each variant writes over other bytes than those it is to leave.
  item.poison = [&] {
    for (const int64_t entry : memory.checked()) {
      const auto bytes = static_cast<size_t>(block_bytes);
      if (op == "scrub") check(cudaMemset(memory.block_at(false, entry), 0xA5, bytes));
      if (op == "copy") check(cudaMemset(memory.block_at(true, entry), 0xA5, bytes));
      if (op == "checksum") check(cudaMemset(memory.checksums(0) + entry, 0xA5, 8));
    }
    check(cudaDeviceSynchronize());
  };
  item.difference = [&] { return difference_of(op, memory); };
  bench.measure(item);
}

std::string device_uuid() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0));
  std::string text;
  constexpr char kDigits[] = "0123456789abcdef";
  for (const char signed_byte : properties.uuid.bytes) {
    const auto byte = static_cast<unsigned char>(signed_byte);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

// Blocks at random places of the pool, one after another in pinned memory.
void host_case(Bench& bench, int64_t block_bytes, bool to_device) {
  const std::string label = std::string("host_copy/") + (to_device ? "to_device/" : "to_host/") +
                            std::to_string(block_bytes);
  if (!bench.wants(label)) return;
  const int64_t count = kGiB / block_bytes;
  const auto calls = must(kernels::DeviceCalls::create(device_uuid()));
  const BlocksItem memory(block_bytes, count, 1);
  std::byte* pinned = nullptr;
  check(cudaMallocHost(reinterpret_cast<void**>(&pinned), kGiB));
  std::vector<kernels::ByteCopy> copies;
  for (int64_t i = 0; i < count; ++i) {
    std::byte* on_host = pinned + i * block_bytes;
    std::byte* on_device = memory.block_at(false, i);
    copies.push_back({to_device ? on_device : on_host, to_device ? on_host : on_device,
                      static_cast<size_t>(block_bytes)});
  }
  const DeviceMemory whole(kGiB);
  const auto once = [&](int which) {
    if (which == 0) return must(calls->copy_bytes(copies));
    check(cudaMemcpyAsync(to_device ? whole.data() : pinned, to_device ? pinned : whole.data(),
                          kGiB, cudaMemcpyDefault, bench.stream()));
    check(cudaStreamSynchronize(bench.stream()));
  };
  for (int64_t i = 0; i < kGiB; ++i) pinned[i] = static_cast<std::byte>(i * 2654435761 >> 13);
  once(0);
  std::string text;
  for (const int64_t entry : memory.checked()) {
    const std::span on_host(pinned + entry * block_bytes, static_cast<size_t>(block_bytes));
    if (text.empty()) text = first_difference(memory.block(false, entry), on_host, "a block");
  }
  if (!text.empty()) std::fprintf(stderr, "%s: %s\n", label.c_str(), text.c_str());
  bench.measure_host(label,
                     {{"op", to_device ? "host_to_device" : "device_to_host"},
                      {"block_bytes", block_bytes},
                      {"blocks", count}},
                     kGiB, "DeviceCalls::copy_bytes", once, text.empty());
  check(cudaFreeHost(pinned));
}

}  // namespace

void bench_blocks(Bench& bench) {
  for (const std::string op : {"copy", "scrub", "checksum"}) {
    bench.begin_group(op);
    for (const int64_t block_bytes : {18 * kMiB / 1024, kMiB / 4, 2 * kMiB})
      for (const int64_t count : {int64_t{1}, kCallBytes / block_bytes})
        blocks_case(bench, op, block_bytes, count);
  }
}

void bench_host_copies(Bench& bench) {
  bench.begin_group("copies of blocks between host and device");
  for (const int64_t block_bytes : {kMiB / 16, kMiB / 4, 2 * kMiB})
    for (const bool to_device : {true, false}) host_case(bench, block_bytes, to_device);
}

}  // namespace larder::test
