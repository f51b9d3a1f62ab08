// Private to client: what every function of the C API is made from. `guarded` turns a Status or an
// exception into a code and the thread's sentence; `Arguments` reads what a C caller gave.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "larder/client.h"
#include "larder/larder.h"

namespace larder::c_api {

// A pool and the client that it needs.
struct PoolState {
  std::shared_ptr<Client> client;  // owners: the client's handle and its pools
  Pool pool;
};

// Keeps the sentence for larder_last_error and returns the code.
larder_code finish(const Status& status) noexcept;
// The same for the exception that is being handled.
larder_code finish_exception() noexcept;

template <typename Call>
larder_code guarded(Call call) noexcept {
  try {
    return finish(call());
  } catch (...) {
    return finish_exception();
  }
}

// Defaults, as C callers get them. The macros are the only place that says them.
template <typename Struct>
Struct defaults();

// Reads arguments one after another and keeps the first refusal; what is read after it is harmless
// and of no use, so a function reads all and asks once.
class Arguments {
 public:
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  void refuse(std::string sentence);

  // False, and a refusal, where a pointer is NULL.
  bool required(std::string_view field, const void* pointer);

  template <typename T>
  std::span<const T> array(std::string_view field, const T* values, size_t count) {
    // NOLINTNEXTLINE(bugprone-sizeof-expression): arrays of pointers to arrays are arrays, too.
    return check_array(field, values, count, sizeof(T), alignof(T)) ? std::span(values, count)
                                                                    : std::span<const T>();
  }
  // An array whose length follows from other fields.
  template <typename T>
  std::span<const T> array(std::string_view field, const T* values, int64_t rows, int64_t columns) {
    return array(field, values, product(field, rows, columns));
  }
  template <typename T>
  std::span<T> output(std::string_view field, T* values, size_t count) {
    return check_array(field, values, count, sizeof(T), alignof(T)) ? std::span(values, count)
                                                                    : std::span<T>();
  }
  // rows * columns, both given by a caller.
  size_t product(std::string_view field, int64_t rows, int64_t columns);
  // Room for `needed` entries in an array of `capacity`.
  void room(std::string_view field, const void* values, size_t capacity, size_t needed);

  bool flag(std::string_view field, int32_t value);
  void reserved(std::string_view where, uint32_t value);
  ContextShard context_shard(const larder_context_shard& given);
  LseForm lse_form(std::string_view field, larder_lse_form bits);
  // An enumeration whose values are the indices of its names.
  template <typename Enum, size_t kCount>
  Enum choice(std::string_view field, uint32_t value,
              const std::array<std::string_view, kCount>& names) {
    return check_choice(field, value, names) ? static_cast<Enum>(value) : Enum{};
  }

  TensorView tensor(std::string_view field, const larder_tensor* tensor);
  AttentionGeometry geometry(const larder_geometry& given);
  std::vector<BlockHandle> blocks(std::string_view field, const larder_block* blocks, size_t count);
  std::vector<std::string> strings(std::string_view field, const larder_bytes* bytes, size_t count);
  PagedKv paged_kv(const larder_paged_kv* given);
  AttendOptions attend_options(const larder_attend_options* given);

  // A struct that may grow, completed with defaults.
  template <typename Struct>
  Struct complete(std::string_view field, const Struct* given) {
    Struct full = defaults<Struct>();
    if (required(field, given)) read_struct(field, given, &full, sizeof full);
    return full;
  }
  template <typename Struct>
  Struct complete_or_defaults(std::string_view field, const Struct* given) {
    return given == nullptr ? defaults<Struct>() : complete(field, given);
  }
  // The bytes of an output struct that its caller has, struct_size left as it is.
  template <typename Struct>
  size_t struct_bytes(std::string_view field, const Struct* given) {
    return required(field, given) ? known_struct_bytes(field, given->struct_size, sizeof(Struct))
                                  : 0;
  }

 private:
  bool check_array(std::string_view field, const void* values, size_t count, size_t entry_bytes,
                   size_t alignment);
  bool check_choice(std::string_view field, uint32_t value,
                    std::span<const std::string_view> names);
  size_t known_struct_bytes(std::string_view field, size_t struct_size, size_t full_bytes);
  void read_struct(std::string_view field, const void* given, void* full, size_t full_bytes);

  Status status_;
};

// Writes the first `bytes` bytes of `full` but its struct_size.
template <typename Struct>
void write_struct(const Struct& full, Struct* out, size_t bytes) {
  static_assert(std::is_trivially_copyable_v<Struct> && offsetof(Struct, struct_size) == 0);
  const auto* from = reinterpret_cast<const std::byte*>(&full);
  auto* to = reinterpret_cast<std::byte*>(out);
  for (size_t i = sizeof(size_t); i < bytes; ++i) to[i] = from[i];
}

// Copies what there is into the caller's array, or says how much room that takes. NULL with a
// capacity of 0 only asks.
template <typename From, typename To, typename Convert>
Status write_array(std::string_view field, std::span<const From> values, To* out, size_t capacity,
                   size_t* count, Convert convert) {
  *count = values.size();
  if (out == nullptr && capacity == 0) return {};
  Arguments in;
  in.room(field, out, capacity, values.size());
  if (in.ok()) std::transform(values.begin(), values.end(), out, convert);
  return in.status();
}

inline std::string text_or(const char* text, const char* fallback) {
  return text == nullptr ? fallback : text;
}

// With all groups (c_api_options.cpp).
PoolOptions pool_options(Arguments& in, const larder_pool_options* given);
larder_geometry to_c(const AttentionGeometry& geometry);
// A daemon that answers with another number of entries than it was asked for is wrong.
Status expect_count(std::string_view field, size_t count, size_t expected);
inline larder_block to_c(const BlockHandle& block) { return {block.id, block.generation}; }
inline larder_published_block to_c(const PublishedBlock& published) {
  larder_published_block result = {};
  std::copy(published.key.begin(), published.key.end(), result.key);
  result.block = to_c(published.block);
  return result;
}

template <>
inline larder_client_options defaults() {
  return LARDER_CLIENT_OPTIONS_INIT;
}
template <>
inline larder_pool_options defaults() {
  return LARDER_POOL_OPTIONS_INIT;
}
template <>
inline larder_group_options defaults() {
  return LARDER_GROUP_OPTIONS_INIT;
}
template <>
inline larder_attend_options defaults() {
  return LARDER_ATTEND_OPTIONS_INIT;
}
template <>
inline larder_attend_batch defaults() {
  return LARDER_ATTEND_BATCH_INIT;
}
template <>
inline larder_sparse_batch defaults() {
  return LARDER_SPARSE_BATCH_INIT;
}
template <>
inline larder_gather_batch defaults() {
  return LARDER_GATHER_BATCH_INIT;
}
template <>
inline larder_paged_kv defaults() {
  return LARDER_PAGED_KV_INIT;
}
template <>
inline larder_merge_options defaults() {
  return LARDER_MERGE_OPTIONS_INIT;
}
template <>
inline larder_combine_options defaults() {
  return LARDER_COMBINE_OPTIONS_INIT;
}

}  // namespace larder::c_api

struct larder_client {
  std::shared_ptr<larder::Client> client;
};
struct larder_pool {
  std::shared_ptr<larder::c_api::PoolState> state;  // owners: the pool's handle and its sequences
};
struct larder_sequence {
  std::shared_ptr<larder::c_api::PoolState> state;
  larder::Sequence sequence;  // ends before its pool closes
};
