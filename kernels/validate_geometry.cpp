// What geometry a pool may have.
#include "kernels/choose.h"
#include "kernels/kernel_table.h"
#include "kernels/refuse.h"

namespace larder::kernels {
namespace {

Status validate_field(std::string_view field, int32_t value, int32_t limit) {
  if (value >= 1 && value <= limit) return {};
  return refuse(ErrorCode::kInvalidArgument, field, " is ", value, ": expected 1 to ", limit);
}

Status validate_dim(std::string_view side, int32_t dim, KvFormat format) {
  const std::string field = std::string(side) + "_dim";
  if (Status s = validate_field(field, dim, kMaxHeadDim); !s.ok()) return s;
  if (format == KvFormat::kNvfp4 && dim % kNvfp4GroupElements != 0)
    return refuse(ErrorCode::kInvalidArgument, field, " is ", dim, ": nvfp4 needs a multiple of ",
                  kNvfp4GroupElements);
  return {};
}

Status validate_range(std::string_view field, size_t value, size_t count) {
  if (value < count) return {};
  return refuse(ErrorCode::kInvalidArgument, field, " is ", value, ": expected 0 to ", count - 1);
}

Status validate_enums(const AttentionGeometry& geometry, Encoder encoder,
                      KeyTransform key_transform) {
  const auto index = [](auto value) { return static_cast<size_t>(value); };
  if (Status s = validate_range("k_format", index(geometry.k_format), kKvFormatNames.size());
      !s.ok())
    return s;
  if (Status s = validate_range("v_format", index(geometry.v_format), kKvFormatNames.size());
      !s.ok())
    return s;
  if (Status s = validate_range("mla_row", index(geometry.mla_row), kMlaRowNames.size()); !s.ok())
    return s;
  if (Status s = validate_range("encoder", index(encoder), kEncoderNames.size()); !s.ok()) return s;
  return validate_range("key_transform", index(key_transform), kKeyTransformNames.size());
}

// MLA rows leave nothing to choose but the number of layers, the block size and the row format.
Status validate_mla(const AttentionGeometry& geometry, Encoder encoder,
                    KeyTransform key_transform) {
  const AttentionGeometry wanted =
      mla_geometry(geometry.num_layers, geometry.block_tokens, geometry.mla_row);
  const auto refuse_field = [&](std::string_view field, const auto& value, const auto& expected) {
    return refuse(ErrorCode::kInvalidArgument, field, " is ", value, ": ", name(geometry.mla_row),
                  " needs ", expected);
  };
  if (geometry.num_kv_heads != wanted.num_kv_heads)
    return refuse_field("num_kv_heads", geometry.num_kv_heads, wanted.num_kv_heads);
  if (geometry.k_dim != wanted.k_dim) return refuse_field("k_dim", geometry.k_dim, wanted.k_dim);
  if (geometry.v_dim != wanted.v_dim) return refuse_field("v_dim", geometry.v_dim, wanted.v_dim);
  if (geometry.k_format != wanted.k_format)
    return refuse_field("k_format", name(geometry.k_format), name(wanted.k_format));
  if (geometry.v_format != wanted.v_format)
    return refuse_field("v_format", name(geometry.v_format), name(wanted.v_format));
  if (encoder != Encoder::kReference)
    return refuse(ErrorCode::kUnsupported, "encoder is ", name(encoder), ": ",
                  name(geometry.mla_row), " has the encoder reference alone");
  if (key_transform != KeyTransform::kNone)
    return refuse(ErrorCode::kUnsupported, "key_transform is ", name(key_transform), ": ",
                  name(geometry.mla_row), " is served with none");
  return {};
}

}  // namespace

Status validate_geometry(const AttentionGeometry& geometry, Encoder encoder,
                         KeyTransform key_transform) {
  if (Status s = validate_enums(geometry, encoder, key_transform); !s.ok()) return s;
  if (Status s = validate_field("num_layers", geometry.num_layers, kMaxLayers); !s.ok()) return s;
  if (Status s = validate_field("num_kv_heads", geometry.num_kv_heads, kMaxKvHeads); !s.ok())
    return s;
  if (Status s = validate_field("block_tokens", geometry.block_tokens, kMaxBlockTokens); !s.ok())
    return s;
  if (Status s = validate_dim("k", geometry.k_dim, geometry.k_format); !s.ok()) return s;
  if (Status s = validate_dim("v", geometry.v_dim, geometry.v_format); !s.ok()) return s;
  if (geometry.mla_row != MlaRow::kNone) {
    if (Status s = validate_mla(geometry, encoder, key_transform); !s.ok()) return s;
  } else if (is_rotated(key_transform) && geometry.k_dim % kNvfp4GroupElements != 0) {
    return refuse(ErrorCode::kInvalidArgument, "k_dim is ", geometry.k_dim, ": key_transform ",
                  name(key_transform), " needs a multiple of ", kNvfp4GroupElements);
  }

  AppendParams append;
  append.layer.geometry = geometry;
  append.layer.encoder = encoder;
  append.layer.key_transform = key_transform;
  if (auto row = choose(append_kernels(), append, Backend::kCpu); !row) return row.status();
  GatherParams gather;
  gather.layer = append.layer;
  if (auto row = choose(gather_kernels(), gather, Backend::kCpu); !row) return row.status();
  AttendParams attend;
  attend.layer = append.layer;
  if (auto row = choose(attend_kernels(), attend, Backend::kCpu); !row) return row.status();
  return {};
}

}  // namespace larder::kernels
