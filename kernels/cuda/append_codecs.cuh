// A group of 16 values on its way into a page: one codec per format, for tuned rows.
//
// store() is called by every lane of a warp, also by those whose page is nullptr, which write
// nothing; groups of one row have neighbouring lanes. Groups that are not finite come out wrong,
// but where copies() says that bits are copied: store_any() is for them, called by single lanes.
#pragma once

#include "kernels/cuda/scale_search.cuh"

namespace larder::kernels::cuda {

// Where the bytes of one group go.
struct GroupPlace {
  uint8_t* page;
  uint32_t data;   // offset in the page
  uint32_t scale;  // offset in the page
};

// bf16 and fp16 rows. A value of its own type that nothing has changed is stored bit for bit.
template <class Output>
struct Rows16 {
  static constexpr int kDataBytes = 32;

  template <class Input>
  __device__ static bool copies(bool changed) {
    return !changed && Input::kDtype == Output::kDtype;
  }
  template <class Input>
  __device__ static void store(const TensorScale&, const Words& words, const Group& group,
                               bool changed, const GroupPlace& to) {
    Words out = words;
    if (!copies<Input>(changed)) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        out.at[i] = Output::pair(group.values[2 * i], group.values[2 * i + 1]);
    }
    store_words_in_pairs(out, to.page == nullptr ? nullptr : to.page + to.data);
  }
  __device__ static void store_any(const TensorScale&, const Group& group, const GroupPlace& to) {
    Words out;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      out.at[i] = Output::bits(group.values[2 * i]) | Output::bits(group.values[2 * i + 1]) << 16;
    store_words(out, to.page + to.data);
  }
};

template <bool kE5m2>
struct Rows8 {
  static constexpr int kDataBytes = 16;

  template <class Input>
  __device__ static bool copies(bool) {
    return false;
  }
  __device__ static uint32_t pair(float a, float b) {
    return kE5m2 ? e5m2_pair(a, b) : e4m3_pair(a, b);
  }
  template <class Input>
  __device__ static void store(const TensorScale& scale, const Words&, const Group& group, bool,
                               const GroupPlace& to) {
    if (to.page != nullptr) store_any(scale, group, to);
  }
  __device__ static void store_any(const TensorScale& scale, const Group& group,
                                   const GroupPlace& to) {
    if (scale.one.value == 1.0f)
      store_quotients(group.values, to);
    else
      store_divided(scale.one, group, to);
  }

 private:
  __device__ static void store_divided(const Divisor& scale, const Group& group,
                                       const GroupPlace& to) {
    float quotients[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) quotients[i] = quotient(group.values[i], scale);
    store_quotients(quotients, to);
  }
  __device__ static void store_quotients(const float* values /* [16] */, const GroupPlace& to) {
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = pair(values[4 * i], values[4 * i + 1]) | pair(values[4 * i + 2], values[4 * i + 3])
                                                            << 16;
    *reinterpret_cast<uint4*>(to.page + to.data) = {out[0], out[1], out[2], out[3]};
  }
};

template <Encoder kEncoder>
struct Rows4 {
  static constexpr int kDataBytes = 8;

  template <class Input>
  __device__ static bool copies(bool) {
    return false;
  }
  __device__ static void store(const EncodedGroup& encoded, const GroupPlace& to) {
    *reinterpret_cast<uint2*>(to.page + to.data) = {encoded.codes.words[0], encoded.codes.words[1]};
    to.page[to.scale] = encoded.scale;
  }
  template <class Input>
  __device__ static void store(const TensorScale& scale, const Words&, const Group& group, bool,
                               const GroupPlace& to) {
    const Nvfp4Scale found = ScaleSearch<kEncoder>::scale_of(group, scale);
    const bool clamps = kEncoder == Encoder::kBestScale || may_saturate(found.byte);
    const Codes codes = clamps ? finite_codes<true>(group, found.inverse)
                               : finite_codes<false>(group, found.inverse);
    if (to.page != nullptr) store({codes, found.byte}, to);
  }
  __device__ static void store_any(const TensorScale& scale, const Group& group,
                                   const GroupPlace& to) {
    store(encode_plainly(kEncoder, group, scale.one.value), to);
  }
};

}  // namespace larder::kernels::cuda
