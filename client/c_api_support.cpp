#include "client/c_api_support.h"

#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "larder/system_error.h"

namespace larder::c_api {
namespace {

// Structs grow by a few fields at a time: a larger size is memory that nobody has initialised.
constexpr size_t kMaxStructBytes = 4096;

// Numbers of enumerations and the shapes of structs are the ABI.
template <typename Enum>
constexpr bool same(uint32_t c_value, Enum value) {
  return c_value == static_cast<uint32_t>(value);
}
static_assert(same(LARDER_OK, ErrorCode::kOk));
static_assert(same(LARDER_INVALID_ARGUMENT, ErrorCode::kInvalidArgument));
static_assert(same(LARDER_UNSUPPORTED, ErrorCode::kUnsupported));
static_assert(same(LARDER_RESOURCE_EXHAUSTED, ErrorCode::kResourceExhausted));
static_assert(same(LARDER_NOT_FOUND, ErrorCode::kNotFound));
static_assert(same(LARDER_STALE_GENERATION, ErrorCode::kStaleGeneration));
static_assert(same(LARDER_STALE_SESSION, ErrorCode::kStaleSession));
static_assert(same(LARDER_PERMISSION_DENIED, ErrorCode::kPermissionDenied));
static_assert(same(LARDER_BUSY, ErrorCode::kBusy));
static_assert(same(LARDER_DEADLINE_EXCEEDED, ErrorCode::kDeadlineExceeded));
static_assert(same(LARDER_SHUTTING_DOWN, ErrorCode::kShuttingDown));
static_assert(same(LARDER_UNAVAILABLE, ErrorCode::kUnavailable));
static_assert(same(LARDER_INTERNAL, ErrorCode::kInternal));
static_assert(LARDER_INTERNAL == kNumErrorCodes - 1);
static_assert(same(LARDER_DTYPE_BF16, Dtype::kBf16) && same(LARDER_DTYPE_FP16, Dtype::kFp16) &&
              same(LARDER_DTYPE_FP32, Dtype::kFp32) &&
              same(LARDER_DTYPE_FP8_E4M3, Dtype::kFp8E4m3) &&
              same(LARDER_DTYPE_E2M1X2, Dtype::kE2m1x2) &&
              LARDER_DTYPE_E2M1X2 == kDtypeNames.size() - 1);
static_assert(same(LARDER_KV_FORMAT_BF16, KvFormat::kBf16) &&
              same(LARDER_KV_FORMAT_FP16, KvFormat::kFp16) &&
              same(LARDER_KV_FORMAT_FP8_E4M3, KvFormat::kFp8E4m3) &&
              same(LARDER_KV_FORMAT_FP8_E5M2, KvFormat::kFp8E5m2) &&
              same(LARDER_KV_FORMAT_NVFP4, KvFormat::kNvfp4) &&
              LARDER_KV_FORMAT_NVFP4 == kKvFormatNames.size() - 1);
static_assert(same(LARDER_ENCODER_REFERENCE, Encoder::kReference) &&
              same(LARDER_ENCODER_FOUR_OVER_SIX, Encoder::kFourOverSix) &&
              same(LARDER_ENCODER_BEST_SCALE, Encoder::kBestScale) &&
              LARDER_ENCODER_BEST_SCALE == kEncoderNames.size() - 1);
static_assert(same(LARDER_KEY_TRANSFORM_NONE, KeyTransform::kNone) &&
              same(LARDER_KEY_TRANSFORM_CENTRED, KeyTransform::kCentred) &&
              same(LARDER_KEY_TRANSFORM_ROTATED, KeyTransform::kRotated) &&
              same(LARDER_KEY_TRANSFORM_CENTRED_ROTATED, KeyTransform::kCentredRotated) &&
              LARDER_KEY_TRANSFORM_CENTRED_ROTATED == kKeyTransformNames.size() - 1);
static_assert(same(LARDER_MLA_ROW_NONE, MlaRow::kNone) &&
              same(LARDER_MLA_ROW_NVFP4_DS, MlaRow::kNvfp4Ds) &&
              same(LARDER_MLA_ROW_FP8_DS, MlaRow::kFp8Ds) &&
              same(LARDER_MLA_ROW_FP8, MlaRow::kFp8) && same(LARDER_MLA_ROW_BF16, MlaRow::kBf16) &&
              LARDER_MLA_ROW_BF16 == kMlaRowNames.size() - 1);
static_assert(same(LARDER_LAYOUT_BLHNC, KvLayout::kBlhnc) &&
              same(LARDER_LAYOUT_LBHNC, KvLayout::kLbhnc) &&
              LARDER_LAYOUT_LBHNC == kKvLayoutNames.size() - 1);
static_assert(same(LARDER_EXECUTION_IN_PROCESS, Execution::kInProcess) &&
              same(LARDER_EXECUTION_ON_REQUEST, Execution::kOnRequest));
static_assert(same(LARDER_V_SCALE_ORDER_LINEAR, VScaleOrder::kLinear) &&
              same(LARDER_V_SCALE_ORDER_SWIZZLED, VScaleOrder::kSwizzled) &&
              LARDER_V_SCALE_ORDER_SWIZZLED == kVScaleOrderNames.size() - 1);
static_assert(same(LARDER_PAGE_ORDER_NHD, PageOrder::kNhd) &&
              same(LARDER_PAGE_ORDER_HND, PageOrder::kHnd) &&
              LARDER_PAGE_ORDER_HND == kPageOrderNames.size() - 1);
// No padding in any of them: a later field cannot come to lie where older callers wrote nothing.
static_assert(sizeof(larder_tensor) == 64 && sizeof(larder_block) == 8 &&
              sizeof(larder_published_block) == 40 && sizeof(larder_bytes) == 16 &&
              sizeof(larder_geometry) == 32 && sizeof(larder_page_layout) == 40 &&
              sizeof(larder_group_stats) == 256 && sizeof(larder_resize_result) == 32 &&
              sizeof(larder_paged_rows) == 32 && sizeof(larder_attention_state) == 72 &&
              sizeof(larder_context_shard) == 12);
static_assert(sizeof(larder_client_options) == 56 && sizeof(larder_pool_options) == 184 &&
              sizeof(larder_group_options) == 152 && sizeof(larder_pool_info) == 104 &&
              sizeof(larder_attend_options) == 112 && sizeof(larder_attend_batch) == 224 &&
              sizeof(larder_sparse_batch) == 168 && sizeof(larder_gather_batch) == 184 &&
              sizeof(larder_paged_kv) == 184 && sizeof(larder_merge_options) == 40 &&
              sizeof(larder_combine_options) == 32);

thread_local std::string last_sentence;
thread_local const char* last_error = "";

Status status_of(const SystemError& error) {
  switch (error.code().value()) {
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case ENOSPC:
      return {ErrorCode::kResourceExhausted, error.what()};
    case EACCES:
    case EPERM:
      return {ErrorCode::kPermissionDenied, error.what()};
    case ECONNREFUSED:
    case ECONNRESET:
    case ENOTCONN:
    case EPIPE:
      return {ErrorCode::kUnavailable, error.what()};
    default:
      return {ErrorCode::kInternal, error.what()};
  }
}

Status status_of_exception() {
  try {
    throw;
  } catch (const SystemError& error) {
    return status_of(error);
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kResourceExhausted, "this process has no memory for the call"};
  } catch (const std::length_error& error) {
    return {ErrorCode::kResourceExhausted,
            std::string("the call needs more memory than can be addressed: ") + error.what()};
  } catch (const std::exception& error) {
    return {ErrorCode::kInternal, std::string("unexpected exception: ") + error.what()};
  } catch (...) {
    return {ErrorCode::kInternal, "unexpected exception of an unknown type"};
  }
}

std::string number(auto value) { return std::to_string(value); }

std::string listed(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

}  // namespace

larder_code finish(const Status& status) noexcept {
  if (status.ok()) {
    last_error = "";
    return LARDER_OK;
  }
  try {
    last_sentence = status.message();
    last_error = last_sentence.c_str();
  } catch (...) {
    last_error = "this process has no memory for the sentence";
  }
  return static_cast<larder_code>(status.code());
}

larder_code finish_exception() noexcept {
  try {
    return finish(status_of_exception());
  } catch (...) {  // only for want of memory
    last_error = "this process has no memory for the sentence";
    return LARDER_RESOURCE_EXHAUSTED;
  }
}

void Arguments::refuse(std::string sentence) {
  if (status_.ok()) status_ = Status(ErrorCode::kInvalidArgument, std::move(sentence));
}

bool Arguments::required(std::string_view field, const void* pointer) {
  if (pointer == nullptr) refuse(std::string(field) + " is NULL");
  return pointer != nullptr;
}

bool Arguments::check_array(std::string_view field, const void* values, size_t count,
                            size_t entry_bytes, size_t alignment) {
  const std::string entries = std::string(field) + " with " + number(count) + " entries";
  if (count > static_cast<size_t>(std::numeric_limits<ptrdiff_t>::max()) / entry_bytes) {
    refuse(entries + " passes 2^63 bytes");
  } else if (count > 0 && values == nullptr) {
    refuse(entries + " is NULL");
  } else if (count > 0 && reinterpret_cast<uintptr_t>(values) % alignment != 0) {
    refuse(std::string(field) + " is not aligned to " + number(alignment) + " bytes");
  } else {
    return true;
  }
  return false;
}

size_t Arguments::product(std::string_view field, int64_t rows, int64_t columns) {
  int64_t entries = 0;
  if (rows >= 0 && columns >= 0 && !__builtin_mul_overflow(rows, columns, &entries))
    return static_cast<size_t>(entries);
  refuse(std::string(field) + " has " + number(rows) + " rows of " + number(columns) +
         " entries, expected 0 or more, fewer than 2^63 together");
  return 0;
}

void Arguments::room(std::string_view field, const void* values, size_t capacity, size_t needed) {
  if (capacity < needed)
    refuse(std::string(field) + " has a capacity of " + number(capacity) + ", " + number(needed) +
           " entries are needed");
  else if (needed > 0)
    required(field, values);
}

bool Arguments::flag(std::string_view field, int32_t value) {
  if (value != 0 && value != 1)
    refuse(std::string(field) + " is " + number(value) + ", expected 0 or 1");
  return value == 1;
}

void Arguments::reserved(std::string_view where, uint32_t value) {
  if (value != 0) refuse(std::string(where) + ": reserved is " + number(value) + ", expected 0");
}

LseForm Arguments::lse_form(std::string_view field, larder_lse_form bits) {
  constexpr larder_lse_form kAll =
      LARDER_LSE_BASE2 | LARDER_LSE_INCLUDES_SINK | LARDER_LSE_HEADS_FIRST;
  if ((bits & ~kAll) != 0)
    refuse(std::string(field) + " is " + number(bits) + ", expected bits of " + number(kAll));
  return {(bits & LARDER_LSE_BASE2) != 0, (bits & LARDER_LSE_INCLUDES_SINK) != 0,
          (bits & LARDER_LSE_HEADS_FIRST) != 0};
}

bool Arguments::check_choice(std::string_view field, uint32_t value,
                             std::span<const std::string_view> names) {
  if (value < names.size()) return true;
  refuse(std::string(field) + " is " + number(value) + ", expected 0 to " +
         number(names.size() - 1) + " (" + listed(names) + ")");
  return false;
}

size_t Arguments::known_struct_bytes(std::string_view field, size_t struct_size,
                                     size_t full_bytes) {
  if (struct_size >= sizeof(size_t) && struct_size % sizeof(size_t) == 0 &&
      struct_size <= kMaxStructBytes)
    return std::min(struct_size, full_bytes);
  refuse(std::string(field) + ": struct_size is " + number(struct_size) +
         ", expected the sizeof of the struct, as its LARDER_..._INIT sets it");
  return 0;
}

void Arguments::read_struct(std::string_view field, const void* given, void* full,
                            size_t full_bytes) {
  size_t struct_size = 0;
  std::memcpy(&struct_size, given, sizeof struct_size);
  const size_t known = known_struct_bytes(field, struct_size, full_bytes);
  if (known == 0) return;
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (size_t i = known; i < struct_size; ++i) {
    if (bytes[i] == 0) continue;
    refuse(std::string(field) + ": struct_size is " + number(struct_size) +
           ", this library knows " + number(full_bytes) + " bytes, and byte " + number(i) +
           " is not 0");
    return;
  }
  std::memcpy(full, given, known);
}

}  // namespace larder::c_api

const char* larder_last_error(void) { return larder::c_api::last_error; }
