// The C API: errors, names, descriptions of tensors and pages, and the client.
#include "client/c_api_support.h"
#include "kernels/kernel_table.h"

using namespace larder;
using namespace larder::c_api;

namespace {

template <size_t kCount>
const char* name_or_unknown(uint32_t value, const std::array<std::string_view, kCount>& names) {
  return value < kCount ? names[value].data() : "UNKNOWN";  // literals: they end with a NUL
}

template <size_t kCount>
larder_code from_name(const char* name, uint32_t* value,
                      const std::array<std::string_view, kCount>& names) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("name", name) || !in.required("value", value)) return in.status();
    std::string listed;
    for (size_t i = 0; i < kCount; ++i) {
      if (names[i] == name) {
        *value = static_cast<uint32_t>(i);
        return {};
      }
      listed += (i == 0 ? "" : ", ") + std::string(names[i]);
    }
    in.refuse("name is '" + std::string(name) + "', expected one of " + listed);
    return in.status();
  });
}

Result<AttentionGeometry> checked_geometry(const larder_geometry* given) {
  Arguments in;
  if (!in.required("geometry", given)) return in.status();
  const AttentionGeometry geometry = in.geometry(*given);
  if (!in.ok()) return in.status();
  const Status status = kernels::validate_geometry(geometry, Encoder::kReference);
  if (!status.ok()) return status;
  return geometry;
}

larder_paged_rows to_c(const PagedRows& rows) {
  return {rows.base, rows.page_stride_bytes, rows.head_stride_bytes, rows.token_stride_bytes};
}

}  // namespace

extern "C" {

const char* larder_version(void) { return LARDER_VERSION; }

const char* larder_code_name(larder_code code) {
  return error_code_name(static_cast<ErrorCode>(code)).data();
}

const char* larder_dtype_name(larder_dtype dtype) { return name_or_unknown(dtype, kDtypeNames); }
const char* larder_kv_format_name(larder_kv_format format) {
  return name_or_unknown(format, kKvFormatNames);
}
const char* larder_encoder_name(larder_encoder encoder) {
  return name_or_unknown(encoder, kEncoderNames);
}
const char* larder_key_transform_name(larder_key_transform transform) {
  return name_or_unknown(transform, kKeyTransformNames);
}
const char* larder_mla_row_name(larder_mla_row row) { return name_or_unknown(row, kMlaRowNames); }
const char* larder_layout_name(larder_layout layout) {
  return name_or_unknown(layout, kKvLayoutNames);
}
larder_code larder_dtype_from_name(const char* name, larder_dtype* dtype) {
  return from_name(name, dtype, kDtypeNames);
}
larder_code larder_kv_format_from_name(const char* name, larder_kv_format* format) {
  return from_name(name, format, kKvFormatNames);
}
larder_code larder_encoder_from_name(const char* name, larder_encoder* encoder) {
  return from_name(name, encoder, kEncoderNames);
}
larder_code larder_key_transform_from_name(const char* name, larder_key_transform* transform) {
  return from_name(name, transform, kKeyTransformNames);
}
larder_code larder_mla_row_from_name(const char* name, larder_mla_row* row) {
  return from_name(name, row, kMlaRowNames);
}
larder_code larder_layout_from_name(const char* name, larder_layout* layout) {
  return from_name(name, layout, kKvLayoutNames);
}

larder_tensor larder_dense_tensor(void* data, larder_dtype dtype, int64_t tokens, int64_t heads,
                                  int64_t dim) {
  // A product that does not fit wraps: the call that takes the tensor refuses its shape.
  const auto row = static_cast<int64_t>(static_cast<uint64_t>(heads) * static_cast<uint64_t>(dim));
  return {data, dtype, 0, {tokens, heads, dim}, {row, dim, 1}};
}

larder_code larder_mla_geometry(int32_t num_layers, int32_t block_tokens, larder_mla_row row,
                                larder_geometry* geometry) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("geometry", geometry);
    const auto mla_row = in.choice<MlaRow>("row", row, kMlaRowNames);
    if (in.ok()) *geometry = to_c(mla_geometry(num_layers, block_tokens, mla_row));
    return in.status();
  });
}

larder_code larder_geometry_page_layout(const larder_geometry* geometry,
                                        larder_page_layout* layout) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("layout", layout)) return in.status();
    const auto checked = checked_geometry(geometry);
    if (!checked) return checked.status();
    const PageLayout page = page_layout(*checked);
    *layout = {page.k_data_offset_bytes, page.k_scale_offset_bytes, page.v_data_offset_bytes,
               page.v_scale_offset_bytes, page.page_bytes};
    return {};
  });
}

larder_code larder_dense_pages(void* base, const larder_geometry* geometry, int64_t num_pages,
                               larder_page_order order, larder_v_scale_order v_scale_order,
                               larder_paged_kv* paged) {
  return guarded([&]() -> Status {
    Arguments in;
    const size_t bytes = in.struct_bytes("paged", paged);
    const auto page_order = in.choice<PageOrder>("order", order, kPageOrderNames);
    const auto scale_order =
        in.choice<VScaleOrder>("v_scale_order", v_scale_order, kVScaleOrderNames);
    if (num_pages < 0)
      in.refuse("num_pages is " + std::to_string(num_pages) + ", expected 0 or more");
    if (num_pages > 0) in.required("base", base);
    if (!in.ok()) return in.status();
    const auto checked = checked_geometry(geometry);
    if (!checked) return checked.status();
    const PagedKv dense =
        dense_pages(static_cast<std::byte*>(base), *checked, num_pages, page_order, scale_order);
    const larder_paged_kv full = {sizeof full,
                                  to_c(dense.k_data),
                                  to_c(dense.k_scale),
                                  to_c(dense.v_data),
                                  to_c(dense.v_scale),
                                  to_c(dense.geometry),
                                  dense.num_pages,
                                  static_cast<larder_v_scale_order>(dense.v_scale_order),
                                  0};
    write_struct(full, paged, bytes);
    return {};
  });
}

larder_code larder_connect(const larder_client_options* options, larder_client** client) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("client", client)) return in.status();
    *client = nullptr;
    const larder_client_options given = in.complete_or_defaults("options", options);
    if (!in.ok()) return in.status();
    ClientOptions wanted;
    wanted.socket_path = text_or(given.socket_path, "");
    wanted.tenant = text_or(given.tenant, "default");
    wanted.token = text_or(given.token, "");
    wanted.name = text_or(given.name, "client");
    wanted.deadline = std::chrono::microseconds(given.deadline_us);
    wanted.arena_bytes = given.arena_bytes;
    auto connected = Client::connect(std::move(wanted));
    if (!connected) return connected.status();
    *client = new larder_client{std::make_shared<Client>(std::move(*connected))};
    return {};
  });
}

void larder_client_destroy(larder_client* client) { delete client; }

larder_code larder_client_session_id(const larder_client* client, uint64_t* session_id) {
  return guarded([&]() -> Status {
    Arguments in;
    if (in.required("client", client) && in.required("session_id", session_id))
      *session_id = client->client->session_id();
    return in.status();
  });
}

larder_code larder_client_boot_id(const larder_client* client, uint64_t* boot_id) {
  return guarded([&]() -> Status {
    Arguments in;
    if (in.required("client", client) && in.required("boot_id", boot_id))
      *boot_id = client->client->boot_id();
    return in.status();
  });
}

larder_code larder_client_cache_id(const larder_client* client, uint64_t* cache_id) {
  return guarded([&]() -> Status {
    Arguments in;
    if (in.required("client", client) && in.required("cache_id", cache_id))
      *cache_id = client->client->cache_id();
    return in.status();
  });
}

larder_code larder_client_resumes(const larder_client* client, uint64_t* resumes) {
  return guarded([&]() -> Status {
    Arguments in;
    if (in.required("client", client) && in.required("resumes", resumes))
      *resumes = client->client->resumes();
    return in.status();
  });
}

larder_code larder_client_longest_outage(const larder_client* client, int64_t* outage_us) {
  return guarded([&]() -> Status {
    Arguments in;
    if (in.required("client", client) && in.required("outage_us", outage_us))
      *outage_us = client->client->longest_outage().count();
    return in.status();
  });
}

}  // extern "C"
