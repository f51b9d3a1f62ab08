// ByteWriter and ByteReader: plain values as bytes, for the journal and its snapshots.
//
// Numbers are written as they lie in memory (little-endian machines only), lists as a 32-bit count
// and their elements. A reader of bytes that make no sense never reads past their end: it gives
// zeros and says failed().
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace larder {

static_assert(std::endian::native == std::endian::little);

class ByteWriter {
 public:
  void clear() { bytes_.clear(); }
  std::span<const std::byte> bytes() const { return bytes_; }

  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  void put_text(const std::string& text) {
    put(static_cast<uint32_t>(text.size()));
    append(text.data(), text.size());
  }
  // Elements without padding between or inside them.
  template <typename T>
  void put_list(const std::vector<T>& values) {
    static_assert(std::has_unique_object_representations_v<T>);
    put(static_cast<uint32_t>(values.size()));
    append(values.data(), values.size() * sizeof(T));
  }

 private:
  void append(const void* data, size_t size) {
    if (size == 0) return;
    const size_t end = bytes_.size();
    bytes_.resize(end + size);
    std::memcpy(bytes_.data() + end, data, size);
  }
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  bool failed() const { return failed_; }
  bool at_end() const { return !failed_ && bytes_.empty(); }
  void fail() { failed_ = true; }

  template <typename T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    take(&value, sizeof value);
    return value;
  }
  // As get, of a number or enum that must not be above `most`.
  template <typename T>
  T get_up_to(T most) {
    const T value = get<T>();
    if (value <= most) return value;
    failed_ = true;
    return T{};
  }
  bool get_bool() { return get_up_to<uint8_t>(1) != 0; }
  std::string get_text() {
    std::string text(count_of(1), '\0');
    take(text.data(), text.size());
    return text;
  }
  template <typename T>
  std::vector<T> get_list() {
    static_assert(std::has_unique_object_representations_v<T>);
    std::vector<T> values(count_of(sizeof(T)));
    take(values.data(), values.size() * sizeof(T));
    return values;
  }
  // The number of elements that follow, each of at least so many bytes.
  size_t count_of(size_t element_bytes) {
    const auto count = static_cast<size_t>(get<uint32_t>());
    if (count <= bytes_.size() / element_bytes) return count;
    failed_ = true;
    return 0;
  }

 private:
  void take(void* data, size_t size) {
    if (failed_ || size > bytes_.size()) {
      failed_ = true;
      return;
    }
    if (size > 0) std::memcpy(data, bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
  }
  std::span<const std::byte> bytes_;
  bool failed_ = false;
};

}  // namespace larder
