// What CTAs leave in the workspace for the CTA that has the last part of a segment, in packets of
// 16 bytes: numbers, and the stamp of the call. A packet is stored by one access and loaded by one,
// of the scalar type .b128 with relaxed order and a scope, the accesses of which 16-byte atomics
// are made: each is single-copy atomic, so a load that sees the stamp sees the numbers that were
// stored with it. (A pair of .b64 would not do: the elements of a vector are accesses apart.) Every
// packet vouches for itself, in whatever order they come, so nothing has to be ordered with
// anything, and no fence is needed.
//
// A column's state has two floats and all 64 bits of the stamp. Sums are four floats of 22 bits,
// each followed by 10 bits of the stamp, so that they take no more bytes than floats alone: off by
// 2^-14 of themselves at most. What was never written may look like such a packet, one in 2^40, for
// as long as the state beside it has come and the sums have not.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode.cuh"

namespace larder::kernels::cuda {

struct Packet {
  uint32_t words[4];
};

__device__ inline void store_packet(uint8_t* to, const Packet& packet) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 packet;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 packet, {low, high};\n"
      "st.relaxed.gpu.global.b128 [%0], packet;\n"
      "}" ::"l"(to),
      "r"(packet.words[0]), "r"(packet.words[1]), "r"(packet.words[2]), "r"(packet.words[3])
      : "memory");
}
__device__ inline Packet load_packet(const uint8_t* from) {
  Packet packet;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 packet;\n"
      "ld.relaxed.gpu.global.b128 packet, [%4];\n"
      "mov.b128 {low, high}, packet;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}"
      : "=r"(packet.words[0]), "=r"(packet.words[1]), "=r"(packet.words[2]), "=r"(packet.words[3])
      : "l"(from)
      : "memory");
  return packet;
}
// Once it has been read: a graph that is replayed has the same stamp again.
__device__ inline void take_back(uint8_t* packet) { store_packet(packet, {}); }

struct StatePacket {
  float max;
  float total;
  uint64_t stamp;

  __device__ bool is_of(const DecodeCall& call) const { return stamp == call.stamp; }
};
__device__ inline void store_state(uint8_t* to, float max, float total, const DecodeCall& call) {
  store_packet(to, {__float_as_uint(max), __float_as_uint(total), static_cast<uint32_t>(call.stamp),
                    static_cast<uint32_t>(call.stamp >> 32)});
}
__device__ inline StatePacket load_state(const uint8_t* from) {
  const Packet packet = load_packet(from);
  return {__uint_as_float(packet.words[0]), __uint_as_float(packet.words[1]),
          uint64_t{packet.words[3]} << 32 | packet.words[2]};
}

struct SumsPacket {
  Packet packet;

  // Bits of marks that are not those of the call.
  __device__ uint32_t strange_bits(const DecodeCall& call) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= packet.words[i] ^ call.marks[i];
    return bits & kMarkMask;
  }
  __device__ float4 sums() const {
    return {__uint_as_float(packet.words[0] & ~kMarkMask),
            __uint_as_float(packet.words[1] & ~kMarkMask),
            __uint_as_float(packet.words[2] & ~kMarkMask),
            __uint_as_float(packet.words[3] & ~kMarkMask)};
  }
};
// Cutting bits off makes a number smaller, by half of the last bit left on the average: made up for
// before it. (To round by adding to the bits would make zeros of NaNs.)
__device__ inline uint32_t mark(float sum, uint32_t bits) {
  return (__float_as_uint(sum * (1.0f + 0x1p-14f)) & ~kMarkMask) | bits;
}
__device__ inline void store_sums(uint8_t* to, const float4& sums, const DecodeCall& call) {
  store_packet(to, {mark(sums.x, call.marks[0]), mark(sums.y, call.marks[1]),
                    mark(sums.z, call.marks[2]), mark(sums.w, call.marks[3])});
}
__device__ inline SumsPacket load_sums(const uint8_t* from) { return {load_packet(from)}; }

// Bytes of a slot to a column's state, which is its maximum and its total, and to the sums of its
// dims from 4 * four on: lanes which have one four each take neighbouring packets.
template <typename Shape>
struct PacketPlaces {
  static constexpr int kFours = Shape::kDim / 4;

  static constexpr __device__ int state(int column) { return column * kPacketBytes; }
  static constexpr __device__ int sums(int column, int four) {
    return (Shape::kColumns + kFours * column + four) * kPacketBytes;
  }
  static_assert(Shape::kPartBytes == (Shape::kColumns + kFours * Shape::kColumns) * kPacketBytes);
};

// Of four dims of a column, what a slot has.
struct FourPackets {
  StatePacket state;
  SumsPacket sums;

  __device__ bool are_of(const DecodeCall& call) const {
    return state.is_of(call) && sums.strange_bits(call) == 0;
  }
};

}  // namespace larder::kernels::cuda
