// Bytes in the widest units that every address allows, and grids for any number of items.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector_types.h>

namespace larder::kernels::cuda {

// CTAs for so many items, of which each CTA takes every gridDim.x-th.
inline unsigned grid_of(int64_t items) {
  return static_cast<unsigned>(std::min<int64_t>(items, int64_t{1} << 20));
}

// The largest power of two up to 16 that divides the address and every figure.
inline int unit_bytes(const void* address, std::initializer_list<int64_t> figures) {
  uint64_t bits = reinterpret_cast<uintptr_t>(address) | 16;
  for (const int64_t figure : figures) bits |= static_cast<uint64_t>(figure);
  return static_cast<int>(bits & (~bits + 1));
}

// Calls visit(T{}) with T the unit of so many bytes.
template <class Visit>
__device__ inline void with_unit(int bytes, const Visit& visit) {
  // Not a switch: its indirect jump costs more than the tests do.
  if (bytes == 16) return visit(uint4{});
  if (bytes == 8) return visit(uint2{});
  if (bytes == 4) return visit(uint32_t{});
  if (bytes == 2) return visit(uint16_t{});
  return visit(uint8_t{});
}

}  // namespace larder::kernels::cuda
