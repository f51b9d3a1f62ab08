// What the CPU kernels serve, and which scales of a layer belong to its values.
#pragma once

#include "larder/kv_format.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

// The CPU kernels are the definition, so they serve every format, encoder, transform and MLA row
// that passes validate_geometry.
inline Status supports_formats(const AttentionGeometry&) { return {}; }

// decode_row leaves k_scale and v_scale out, so that attention can fold them into the logit scale
// and into the output. What is left to multiply with: nothing for 16-bit formats.
constexpr float tensor_scale(KvFormat format, float scale) {
  return format == KvFormat::kBf16 || format == KvFormat::kFp16 ? 1.0f : scale;
}

// Likewise of decode_mla_row: fp8_mla alone is stored with k_scale.
constexpr float tensor_scale(MlaRow row, float k_scale) {
  return row == MlaRow::kFp8 ? k_scale : 1.0f;
}

}  // namespace larder::kernels::cpu
