// Where a call runs and with what: the second argument of every run_* and launch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace larder::kernels {

enum class Backend : uint8_t { kCpu = 0, kCuda = 1 };
inline constexpr std::array<std::string_view, 2> kBackendNames = {"cpu", "cuda"};
constexpr std::string_view name(Backend backend) {
  return kBackendNames[static_cast<size_t>(backend)];
}

// Where slots, lengths, block tables, lists of blocks and mask offsets lie. On the host they are
// validated before a call; in device memory nobody can look at them before the kernel does.
enum class Tables : uint8_t { kHost = 0, kDevice = 1 };

// Who may use which block, looked up by CUDA kernels where they use a slot or an entry of a table.
struct BlockRights {
  const uint64_t* words = nullptr;  // [num_blocks], readable by the device
  uint64_t own = 0;                 // the word of a block that the caller may write and read
  uint64_t shared = 0;              // the word of a block that it may read
};

// What CUDA kernels found wrong in tables in device memory. Wrong are a slot or a block past the
// pool, a block without the right, a position that is negative or past the tables, a length that is
// negative or longer than its block-table row, a first token that is negative or past the length,
// more q_lens than rows. What is wrong is left out: nothing is written there, its tokens are not
// seen, a length or a first token is cut to what fits. So is, in attention, that lengths of the
// caller's own changed while a call read them: its results are then anything. Zeroed by the caller
// beforehand.
struct CallFaults {
  uint32_t count = 0;
  uint32_t reserved = 0;
  int64_t first_value = 0;  // of one of them: the slot, the block, the position, the length or the
                            // first token
};

struct Target {
  Backend backend = Backend::kCpu;
  // The rest is for CUDA: every pointer of the params is one that the device can use (but
  // MergeParams::outs and lses and AppendParams::further_layers, arrays on the host that name
  // device memory), the work is ordered in the stream, and nothing is waited for or allocated: a
  // launch can be captured in a graph.
  void* stream = nullptr;               // cudaStream_t of the device that holds the pool
  std::byte* workspace = nullptr;       // device memory, 256-byte aligned, not shared with a call
                                        // that may run at the same time
  int64_t workspace_bytes = 0;          // at least what the kernel's workspace_bytes says
  const BlockRights* rights = nullptr;  // on the host, copied; nullptr: all blocks may be used
  CallFaults* faults = nullptr;         // device memory, or nullptr: not counted
};

}  // namespace larder::kernels
