// The K and V formats that the CPU kernels know, for their supports().
#pragma once

#include <string_view>

#include "kernels/refuse.h"
#include "larder/kv_format.h"

namespace larder::kernels::cpu {

inline Status supports_format(std::string_view field, KvFormat format) {
  if (format == KvFormat::kBf16 || format == KvFormat::kNvfp4) return {};
  return refuse(ErrorCode::kUnsupported, field, " is ", name(format),
                ": the cpu kernels serve bf16 and nvfp4");
}

inline Status supports_formats(const AttentionGeometry& geometry) {
  if (Status s = supports_format("k_format", geometry.k_format); !s.ok()) return s;
  return supports_format("v_format", geometry.v_format);
}

}  // namespace larder::kernels::cpu
