// Other libraries' names of KV-cache formats.
#include <algorithm>

#include "kernels/refuse.h"
#include "larder/engine_layouts.h"

namespace larder {
namespace {

using kernels::refuse;
constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;

constexpr std::string_view kServed =
    "served are bfloat16 (bf16), float16 (half, fp16), fp8 (fp8_e4m3), fp8_e5m2, nvfp4, "
    "nvfp4_4over6, fp8_k_nvfp4_v, fp8_k_nvfp4_v_linear_sf, nvfp4_ds_mla, fp8_ds_mla, fp8_mla and "
    "bf16_mla";

struct Named {
  std::string_view name;
  EngineFormat format;
};

constexpr EngineFormat both(KvFormat format, Encoder encoder = Encoder::kReference) {
  return {format, format, encoder, MlaRow::kNone, VScaleOrder::kLinear};
}
constexpr EngineFormat mixed(VScaleOrder order) {
  return {KvFormat::kFp8E4m3, KvFormat::kNvfp4, Encoder::kReference, MlaRow::kNone, order};
}
constexpr EngineFormat mla(MlaRow row) {
  return {KvFormat::kBf16, KvFormat::kBf16, Encoder::kReference, row, VScaleOrder::kLinear};
}

constexpr Named kServedNames[] = {
    {"bfloat16", both(KvFormat::kBf16)},
    {"bf16", both(KvFormat::kBf16)},
    {"float16", both(KvFormat::kFp16)},
    {"half", both(KvFormat::kFp16)},
    {"fp16", both(KvFormat::kFp16)},
    {"fp8", both(KvFormat::kFp8E4m3)},
    {"fp8_e4m3", both(KvFormat::kFp8E4m3)},
    {"fp8_e5m2", both(KvFormat::kFp8E5m2)},
    {"nvfp4", both(KvFormat::kNvfp4)},
    {"nvfp4_4over6", both(KvFormat::kNvfp4, Encoder::kFourOverSix)},
    {"fp8_k_nvfp4_v", mixed(VScaleOrder::kSwizzled)},
    {"fp8_k_nvfp4_v_linear_sf", mixed(VScaleOrder::kLinear)},
    {"nvfp4_ds_mla", mla(MlaRow::kNvfp4Ds)},
    {"fp8_ds_mla", mla(MlaRow::kFp8Ds)},
    {"fp8_mla", mla(MlaRow::kFp8)},
    {"bf16_mla", mla(MlaRow::kBf16)},
};

// Formats of others that differ in their bytes. A trailing '*' stands for any ending.
struct Unserved {
  std::string_view name;
  std::string_view what;
};
constexpr Unserved kUnservedNames[] = {
    {"int8_per_token_head", "int8 with a scale for each token and head"},
    {"fp8_per_token_head", "fp8 with a scale for each token and head"},
    {"int4_per_token_head", "int4 with a scale and a zero point for each token and head"},
    {"turboquant*", "rotated keys as indices of centroids"},
    {"mxfp4*", "fp4 with power-of-two block scales"},
    {"fp4_e2m1", "fp4 with power-of-two block scales, not those of nvfp4"},
    {"mxfp8*", "fp8 with power-of-two block scales"},
    {"kivi*", "2 or 4 bits with scales of keys along tokens"},
    {"int8*", "8-bit integers"},
    {"int4*", "4-bit integers"},
    {"int2*", "2-bit integers"},
    {"fp8_inc", "the fp8 of another accelerator"},
    {"fp8_e4m3fnuz", "an e4m3 with other values"},
    {"fp8_e5m2fnuz", "an e5m2 with other values"},
    {"float32", "32-bit floats"},
    {"float", "32-bit floats"},
    {"fp32", "32-bit floats"},
};

bool matches(std::string_view pattern, std::string_view text) {
  if (!pattern.ends_with('*')) return pattern == text;
  pattern.remove_suffix(1);
  return text.starts_with(pattern);
}

// Rows of other libraries that go by a name of ours, or by none.
std::string_view foreign_row(int64_t row_bytes) {
  switch (row_bytes) {
    case 368:
    case 432:
      return " (another library's nvfp4 rows)";
    case 384:
      return " (FlashInfer's DSV4 nvfp4 rows)";
    case 528:
    case 584:
      return " (DeepSeek V4 fp8 rows with power-of-two scales)";
    default:
      return "";
  }
}

}  // namespace

Result<EngineFormat> parse_engine_format(std::string_view text) {
  for (const Named& known : kServedNames)
    if (known.name == text) return known.format;
  if (text == "auto")
    return refuse(kInvalid, "format is 'auto', which means the model's own dtype: name that; ",
                  kServed);
  for (const Unserved& known : kUnservedNames)
    if (matches(known.name, text))
      return refuse(kUnsupported, "format is '", text, "' (", known.what, "): ", kServed);
  return refuse(kInvalid, "format is '", text.substr(0, 64),
                "', which is no name we know: ", kServed);
}

Result<MlaRow> parse_engine_mla_row(std::string_view text, int64_t row_bytes) {
  const auto format = parse_engine_format(text);
  if (!format) return format.status();
  MlaRow row = format->mla_row;
  if (*format == both(KvFormat::kFp8E4m3)) row = MlaRow::kFp8;
  if (*format == both(KvFormat::kBf16)) row = MlaRow::kBf16;
  if (row == MlaRow::kNone)
    return refuse(kUnsupported, "format is '", text, "' for MLA rows: served are nvfp4_ds_mla, ",
                  "fp8_ds_mla, fp8 and bfloat16");
  if (row_bytes != mla_row_bytes(row))
    return refuse(foreign_row(row_bytes).empty() ? kInvalid : kUnsupported, "rows of '", text,
                  "' have ", row_bytes, " bytes", foreign_row(row_bytes), ": those of ", name(row),
                  " have ", mla_row_bytes(row));
  return row;
}

}  // namespace larder
