#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/stretches.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/checksum.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Words are read as they lie in memory.
static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;
constexpr uint64_t kFirst = 0xBF58476D1CE4E5B9;
constexpr uint64_t kSecond = 0x94D049BB133111EB;
constexpr int64_t kWordBytes = sizeof(uint64_t);

// The finalizer of SplitMix64.
inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * kFirst;
  z = (z ^ (z >> 27)) * kSecond;
  return z ^ (z >> 31);
}

template <class V>
inline V mix_lanes(V z) {
  const hn::DFromV<V> d;
  z = hn::Mul(hn::Xor(z, hn::ShiftRight<30>(z)), hn::Set(d, kFirst));
  z = hn::Mul(hn::Xor(z, hn::ShiftRight<27>(z)), hn::Set(d, kSecond));
  return hn::Xor(z, hn::ShiftRight<31>(z));
}

// The checksum of ChecksumParams over bytes that come in pieces; a word may begin in one piece and
// end in the next. Sums are mod 2^64, so their order does not matter.
class Checksum {
 public:
  void add(const std::byte* bytes, int64_t size) {
    num_bytes_ += static_cast<uint64_t>(size);
    if (pending_ > 0) {
      const int64_t taken = std::min(size, kWordBytes - pending_);
      std::memcpy(word_ + pending_, bytes, static_cast<size_t>(taken));
      pending_ += taken;
      bytes += taken;
      size -= taken;
      if (pending_ < kWordBytes) return;
      add_words(word_, 1);
    }
    const int64_t num_words = size / kWordBytes;
    add_words(bytes, num_words);
    pending_ = size % kWordBytes;
    std::memcpy(word_, bytes + num_words * kWordBytes, static_cast<size_t>(pending_));
  }

  uint64_t finish() {
    if (pending_ > 0) {
      std::memset(word_ + pending_, 0, static_cast<size_t>(kWordBytes - pending_));
      add_words(word_, 1);
    }
    return sum_ + mix(num_bytes_);
  }

 private:
  // Four vectors side by side, as each product waits for the one before it.
  void add_words(const std::byte* words, int64_t count) {
    const hn::ScalableTag<uint64_t> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    // Highway loads without regard to alignment.
    const auto* words64 = reinterpret_cast<const uint64_t*>(words);
    const auto load = [&d, words64](int64_t i) { return hn::LoadU(d, words64 + i); };
    const auto step = hn::Set(d, kGamma * static_cast<uint64_t>(lanes));
    auto key0 =
        hn::Mul(hn::Add(hn::Iota(d, uint64_t{0}), hn::Set(d, num_words_ + 1)), hn::Set(d, kGamma));
    auto key1 = hn::Add(key0, step);
    auto key2 = hn::Add(key1, step);
    auto key3 = hn::Add(key2, step);
    const auto step4 = hn::Set(d, kGamma * static_cast<uint64_t>(4 * lanes));
    auto sum0 = hn::Zero(d);
    auto sum1 = hn::Zero(d);
    int64_t i = 0;
    for (; i + 4 * lanes <= count; i += 4 * lanes) {
      sum0 = hn::Add(sum0, mix_lanes(hn::Add(load(i), key0)));
      sum1 = hn::Add(sum1, mix_lanes(hn::Add(load(i + lanes), key1)));
      sum0 = hn::Add(sum0, mix_lanes(hn::Add(load(i + 2 * lanes), key2)));
      sum1 = hn::Add(sum1, mix_lanes(hn::Add(load(i + 3 * lanes), key3)));
      key0 = hn::Add(key0, step4);
      key1 = hn::Add(key1, step4);
      key2 = hn::Add(key2, step4);
      key3 = hn::Add(key3, step4);
    }
    // Lanes are added here, as some compilers' reductions overflow in signed arithmetic.
    HWY_ALIGN uint64_t sums[HWY_MAX_BYTES / sizeof(uint64_t)];
    hn::Store(hn::Add(sum0, sum1), d, sums);
    for (int64_t lane = 0; lane < lanes; ++lane) sum_ += sums[lane];
    for (; i < count; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, words + i * kWordBytes, sizeof word);
      sum_ += mix(word + (num_words_ + static_cast<uint64_t>(i) + 1) * kGamma);
    }
    num_words_ += static_cast<uint64_t>(count);
  }

  uint64_t sum_ = 0;
  uint64_t num_words_ = 0;
  uint64_t num_bytes_ = 0;
  int64_t pending_ = 0;  // bytes of a begun word
  std::byte word_[kWordBytes] = {};
};

void checksum_on_target(const ChecksumParams& params) {
  const cpu::Stretches stretches = cpu::stretches_of(params.view);
  for (int64_t i = 0; i < params.count; ++i) {
    const std::byte* block = cpu::block_of(params.view, params.blocks[i]);
    Checksum checksum;
    for (int64_t k = 0; k < stretches.count; ++k)
      checksum.add(block + k * stretches.stride_bytes, stretches.bytes);
    params.checksums[i] = checksum.finish();
  }
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace larder::kernels {

HWY_EXPORT(checksum_on_target);

namespace cpu {

Status supports_checksum(const ChecksumParams&) { return {}; }

void checksum(const ChecksumParams& params) { HWY_DYNAMIC_DISPATCH(checksum_on_target)(params); }

}  // namespace cpu
}  // namespace larder::kernels
#endif
