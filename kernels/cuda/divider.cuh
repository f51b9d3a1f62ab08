// Quotients and remainders by a figure that the host knows, without a division on the device.
#pragma once

#include <bit>
#include <cstdint>

namespace larder::kernels::cuda {

// For any divisor below 2^31. The multiplier is 2^shift / divisor, rounded up by less than
// 2^(shift - 31) / divisor, so that no quotient of a dividend below 2^31 is moved.
struct Divider {
  struct Quotient {
    uint32_t quotient;
    uint32_t remainder;
  };
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  // Below 2^31.
  __device__ Quotient divide(uint32_t dividend) const {
    const auto quotient = static_cast<uint32_t>(uint64_t{dividend} * multiplier >> shift);
    return {quotient, dividend - quotient * divisor};
  }
  // The quotient of any dividend that is not negative.
  __device__ int64_t quotient(int64_t dividend) const {
    if (dividend < int64_t{1} << 31) return divide(static_cast<uint32_t>(dividend)).quotient;
    return dividend / divisor;
  }
};

// 1 or more.
inline Divider divider(int value) {
  const auto divisor = static_cast<uint32_t>(value);
  const auto shift = static_cast<uint32_t>(31 + std::bit_width(divisor - 1));
  return {divisor, static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor), shift};
}

}  // namespace larder::kernels::cuda
