// Memory for an arena in a test: page aligned and zeroed, like a new memfd.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "protocol/arena.h"

namespace larder::test {

class ArenaMemory {
 public:
  explicit ArenaMemory(size_t size_bytes = protocol::kMinArenaBytes)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(4096, size_bytes))),
        size_bytes_(size_bytes) {
    clear();
  }
  void clear() { std::memset(memory_.get(), 0, size_bytes_); }
  std::span<std::byte> bytes() const { return {memory_.get(), size_bytes_}; }
  protocol::Arena arena() const { return protocol::Arena(bytes()); }

  // As if so many records had gone through both rings.
  void set_indices(uint32_t submissions, uint32_t completions) const {
    protocol::ArenaHeader& header = arena().header();
    header.submit_head = header.submit_tail = submissions;
    header.complete_head = header.complete_tail = completions;
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte[], Free> memory_;
  size_t size_bytes_;
};

}  // namespace larder::test
