#include "client/ctl/replay/tensor_spec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/e4m3.h"
#include "larder/check.h"

namespace larder::replay {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Values are rounded to float32 first, then to the dtype, as the reference does.
float to_float(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  // The conversion of a number past the range is undefined; half a step above the largest rounds
  // up.
  if (std::isfinite(value) && std::fabs(value) >= kLargest + 0x1p103)
    return std::copysign(std::numeric_limits<float>::infinity(),
                         static_cast<float>(value > 0) - 0.5f);
  return static_cast<float>(value);
}

uint32_t encode(Dtype dtype, double value) {
  const float rounded = to_float(value);
  switch (dtype) {
    case Dtype::kBf16:
      return kernels::float_to_bf16(rounded);
    case Dtype::kFp16:
      return kernels::float_to_fp16(rounded);
    case Dtype::kFp32:
      return std::bit_cast<uint32_t>(rounded);
    case Dtype::kFp8E4m3:
      return kernels::float_to_e4m3(rounded);
    case Dtype::kE2m1x2:
      break;
  }
  LARDER_CHECK(false, "tensors of a replay file have no such dtype");
  return 0;
}

float decode(Dtype dtype, uint32_t bits) {
  switch (dtype) {
    case Dtype::kBf16:
      return kernels::bf16_to_float(static_cast<uint16_t>(bits));
    case Dtype::kFp16:
      return kernels::fp16_to_float(static_cast<uint16_t>(bits));
    case Dtype::kFp32:
      return std::bit_cast<float>(bits);
    case Dtype::kFp8E4m3:
      return kernels::e4m3_to_float(static_cast<uint8_t>(bits));
    case Dtype::kE2m1x2:
      break;
  }
  LARDER_CHECK(false, "tensors of a replay file have no such dtype");
  return 0;
}

std::byte* address_of(const TensorView& view, int64_t t, int64_t h, int64_t d) {
  const std::array<int64_t, 3> index = {t, h, d};
  int64_t offset = 0;
  for (size_t axis = 0; axis < 3; ++axis)  // the stride of an axis of size 1 may be anything
    if (index[axis] > 0) offset += index[axis] * view.strides[axis];
  return static_cast<std::byte*>(view.data) + offset * dtype_bytes(view.dtype);
}

void store(const TensorView& view, std::byte* to, uint32_t bits) {
  std::memcpy(to, &bits, static_cast<size_t>(dtype_bytes(view.dtype)));
}

// Distances of the lowest and the highest element from element 0.
__extension__ using Wide = __int128;
struct Extent {
  Wide low = 0;
  Wide high = 0;
};
Extent extent_of(const std::array<int64_t, 3>& shape, const std::array<int64_t, 3>& strides) {
  Extent extent;
  for (size_t axis = 0; axis < 3; ++axis) {
    const Wide reach = Wide{strides[axis]} * std::max<int64_t>(shape[axis] - 1, 0);
    (reach < 0 ? extent.low : extent.high) += reach;
  }
  return extent;
}

std::array<int64_t, 3> dense_strides(const std::array<int64_t, 3>& shape) {
  return {shape[1] * shape[2], shape[2], 1};
}

// Calls visit(t, h, d, linear) in row-major order.
template <typename Visit>
void for_each_element(const std::array<int64_t, 3>& shape, Visit visit) {
  int64_t linear = 0;
  for (int64_t t = 0; t < shape[0]; ++t)
    for (int64_t h = 0; h < shape[1]; ++h)
      for (int64_t d = 0; d < shape[2]; ++d) visit(t, h, d, linear++);
}

template <typename ValueAt>
void write_all(const TensorView& view, ValueAt value_at) {
  for_each_element(view.shape, [&](int64_t t, int64_t h, int64_t d, int64_t linear) {
    store(view, address_of(view, t, h, d), encode(view.dtype, value_at(t, d, linear)));
  });
}

void write_source(const TensorSpec& spec, const TensorView& view) {
  const auto at = [](const std::vector<double>& list, int64_t i) {
    return list[static_cast<size_t>(i)];
  };
  if (const auto* fill = std::get_if<Fill>(&spec.source)) {
    write_all(view, [&](int64_t, int64_t, int64_t) { return fill->value; });
  } else if (const auto* listed = std::get_if<Listed>(&spec.source)) {
    write_all(view, [&](int64_t, int64_t, int64_t i) { return at(listed->values, i); });
  } else if (const auto* token = std::get_if<PerToken>(&spec.source)) {
    write_all(view, [&](int64_t t, int64_t, int64_t) { return at(token->values, t); });
  } else if (const auto* dim = std::get_if<PerDim>(&spec.source)) {
    write_all(view, [&](int64_t, int64_t d, int64_t) { return at(dim->values, d); });
  } else if (const auto* uniform = std::get_if<Uniform>(&spec.source)) {
    Lcg lcg(uniform->seed);
    write_all(view, [&](int64_t, int64_t, int64_t) {
      return uniform->low + (uniform->high - uniform->low) * lcg.next();
    });
  } else if (const auto* normal = std::get_if<Normal>(&spec.source)) {
    Lcg lcg(normal->seed);
    write_all(view, [&](int64_t, int64_t, int64_t) {
      const double sum = lcg.next() + lcg.next() + lcg.next();
      return (sum - 1.5) * 2.0 * normal->std;
    });
  } else {
    const auto size = static_cast<size_t>(dtype_bytes(view.dtype));
    const std::vector<uint8_t>& bytes = std::get<Bits>(spec.source).bytes;
    for_each_element(view.shape, [&](int64_t t, int64_t h, int64_t d, int64_t linear) {
      std::memcpy(address_of(view, t, h, d), bytes.data() + static_cast<size_t>(linear) * size,
                  size);
    });
  }
}

void write_set(const SetElements& set, const TensorView& view) {
  std::array<int64_t, 3> begin = {0, 0, 0};
  std::array<int64_t, 3> end = view.shape;
  for (size_t axis = 0; axis < 3; ++axis) {
    if (!set.at[axis]) continue;
    begin[axis] = *set.at[axis];
    end[axis] = begin[axis] + 1;
  }
  const uint32_t bits = encode(view.dtype, set.to);
  for (int64_t t = begin[0]; t < end[0]; ++t)
    for (int64_t h = begin[1]; h < end[1]; ++h)
      for (int64_t d = begin[2]; d < end[2]; ++d) store(view, address_of(view, t, h, d), bits);
}

}  // namespace

Tensor make_dense_tensor(Dtype dtype, const std::array<int64_t, 3>& shape, double fill) {
  TensorSpec spec;
  spec.dtype = dtype;
  spec.shape = shape;
  spec.source = Fill{fill};
  return make_tensor(spec);
}

Tensor make_tensor(const TensorSpec& spec) {
  Tensor tensor;
  const auto strides = spec.strides.value_or(dense_strides(spec.shape));
  const Extent extent = extent_of(spec.shape, strides);
  const auto size = static_cast<size_t>(dtype_bytes(spec.dtype));
  const auto num_elements = static_cast<size_t>(extent.high - extent.low + 1);
  tensor.memory.resize(num_elements * size);
  auto* first = tensor.memory.data() - static_cast<int64_t>(extent.low) * dtype_bytes(spec.dtype);
  tensor.view = {first, spec.dtype, spec.shape, strides};
  if (spec.strides) {
    const uint32_t nan = encode(spec.dtype, kNan);
    for (size_t i = 0; i < num_elements; ++i)
      store(tensor.view, tensor.memory.data() + i * size, nan);
  }
  write_source(spec, tensor.view);
  for (const SetElements& set : spec.sets) write_set(set, tensor.view);
  return tensor;
}

std::vector<float> elements_of(const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.shape[0] * view.shape[1] * view.shape[2]));
  const auto size = static_cast<size_t>(dtype_bytes(view.dtype));
  for_each_element(view.shape, [&](int64_t t, int64_t h, int64_t d, int64_t linear) {
    uint32_t bits = 0;
    std::memcpy(&bits, address_of(view, t, h, d), size);
    values[static_cast<size_t>(linear)] = decode(view.dtype, bits);
  });
  return values;
}

std::vector<float> elements_of(const TensorSpec& spec) {
  TensorSpec dense = spec;
  dense.strides.reset();
  return elements_of(make_tensor(dense).view);
}

// -------------------------------------------------------------------------------------- parsing

namespace {

void parse_shape(const Cursor& cursor, size_t rank, TensorSpec& spec) {
  const size_t size = cursor.list_size(3);
  if (cursor.problem().found()) return;
  if (size == 0 || (rank > 0 && size != rank))
    return cursor.refuse("has " + std::to_string(size) + " sizes, expected " +
                         (rank > 0 ? std::to_string(rank) : std::string("1 to 3")));
  spec.rank = size;
  spec.shape = {1, 1, 1};
  int64_t elements = 1;
  bool too_many = false;
  for (size_t i = 0; i < size; ++i) {
    spec.shape[i] = cursor.at(i).integer(0, kMaxTensorElements);
    // A size of 0 must not hide large ones: loops go over the other axes all the same.
    const int64_t factor = std::max<int64_t>(spec.shape[i], 1);
    too_many = too_many || __builtin_mul_overflow(elements, factor, &elements);
  }
  if (too_many || elements > kMaxTensorElements) {
    cursor.refuse("holds more than " + std::to_string(kMaxTensorElements) + " elements");
    spec.shape = {0, 0, 0};
  }
}

std::vector<double> parse_list(const Cursor& cursor, int64_t count, const std::string& what) {
  std::vector<double> values = cursor.numbers(static_cast<size_t>(kMaxTensorElements));
  if (cursor.value().is_array() && static_cast<int64_t>(values.size()) != count)
    cursor.refuse("has " + std::to_string(values.size()) + " numbers, " + what + " needs " +
                  std::to_string(count));
  return values;
}

uint32_t parse_seed(Fields& fields) {
  return static_cast<uint32_t>(
      fields.need("seed").integer(0, std::numeric_limits<uint32_t>::max()));
}

void parse_bits(const Cursor& cursor, TensorSpec& spec) {
  Bits bits{cursor.hex()};
  const int64_t wanted = spec.num_elements() * dtype_bytes(spec.dtype);
  if (static_cast<int64_t>(bits.bytes.size()) != wanted)
    cursor.refuse("has " + std::to_string(bits.bytes.size()) + " bytes, the shape needs " +
                  std::to_string(wanted));
  spec.source = std::move(bits);
}

void parse_source(Fields& fields, TensorSpec& spec) {
  int found = 0;
  if (const auto fill = fields.find("fill")) {
    ++found;
    spec.source = Fill{fill->number()};
  }
  if (const auto values = fields.find("values")) {
    ++found;
    spec.source = Listed{parse_list(*values, spec.num_elements(), "the shape")};
  }
  if (const auto values = fields.find("per_token")) {
    ++found;
    spec.source = PerToken{parse_list(*values, spec.shape[0], "the first axis")};
  }
  if (const auto values = fields.find("per_dim")) {
    ++found;
    spec.source = PerDim{parse_list(*values, spec.shape[2], "the last axis")};
  }
  if (const auto uniform = fields.find("uniform")) {
    ++found;
    Fields inner(*uniform);
    const uint32_t seed = parse_seed(inner);
    const double low = inner.need("low").number();
    spec.source = Uniform{seed, low, inner.need("high").number()};
    inner.finish();
  }
  if (const auto normal = fields.find("normal")) {
    ++found;
    Fields inner(*normal);
    const uint32_t seed = parse_seed(inner);
    spec.source = Normal{seed, inner.need("std").number()};
    inner.finish();
  }
  if (const auto bits = fields.find("bits")) {
    ++found;
    parse_bits(*bits, spec);
  }
  if (found != 1)
    fields.object().refuse("has " + std::to_string(found) +
                           " of \"fill\", \"values\", \"per_token\", \"per_dim\", \"uniform\", "
                           "\"normal\" and \"bits\", expected one");
}

void parse_sets(const Cursor& cursor, TensorSpec& spec) {
  const size_t count = cursor.list_size(kMaxTensorSets);
  for (size_t i = 0; i < count; ++i) {
    Fields fields(cursor.at(i));
    SetElements set;
    const Cursor at = fields.need("at");
    const size_t size = at.list_size(3);
    if (size != spec.rank)
      at.refuse("has " + std::to_string(size) + " indices, the tensor has " +
                std::to_string(spec.rank) + " axes");
    for (size_t axis = 0; axis < std::min(size, spec.rank); ++axis) {
      if (at.at(axis).value().is_null()) continue;
      if (spec.shape[axis] == 0) {
        at.at(axis).refuse("is an index of an axis without elements");
      } else {
        set.at[axis] = at.at(axis).integer(0, spec.shape[axis] - 1);
      }
    }
    set.to = fields.need("to").number();
    fields.finish();
    spec.sets.push_back(set);
  }
}

void parse_strides(const Cursor& cursor, TensorSpec& spec) {
  const size_t size = cursor.list_size(3);
  if (size != spec.rank)
    return cursor.refuse("has " + std::to_string(size) + " strides, the tensor has " +
                         std::to_string(spec.rank) + " axes");
  std::array<int64_t, 3> strides = {1, 1, 1};
  for (size_t axis = 0; axis < size; ++axis)
    strides[axis] = cursor.at(axis).integer(std::numeric_limits<int64_t>::min(),
                                            std::numeric_limits<int64_t>::max());
  const Extent extent = extent_of(spec.shape, strides);
  if (extent.high - extent.low >= kMaxTensorElements)
    return cursor.refuse("spread the tensor over more than " + std::to_string(kMaxTensorElements) +
                         " elements");
  spec.strides = strides;
}

}  // namespace

TensorSpec parse_tensor(const Cursor& cursor, size_t rank, Dtype otherwise) {
  TensorSpec spec;
  Fields fields(cursor);
  parse_shape(fields.need("shape"), rank, spec);
  spec.dtype = otherwise;
  if (const auto dtype = fields.find("dtype"))
    spec.dtype = static_cast<Dtype>(dtype->choice({"bf16", "fp16", "fp32"}));
  parse_source(fields, spec);
  if (const auto sets = fields.find("set")) parse_sets(*sets, spec);
  if (const auto strides = fields.find("strides")) parse_strides(*strides, spec);
  fields.finish();
  return spec;
}

}  // namespace larder::replay
