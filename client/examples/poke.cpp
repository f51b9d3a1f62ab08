#include "client/examples/poke.h"

#include <array>
#include <cstddef>
#include <vector>

namespace larder::examples {
namespace {

// Keeps the sign of `before`; the exponent becomes 7 (7 or 8 in bf16).
uint8_t enlarged(KvFormat format, uint8_t before) {
  int magnitude = 0;
  switch (format) {
    case KvFormat::kBf16:
      magnitude = 0x43;  // eight exponent bits, bias 127; the lowest is in the other byte
      break;
    case KvFormat::kFp16:
    case KvFormat::kFp8E5m2:
      magnitude = 0x58;  // five exponent bits, bias 15
      break;
    case KvFormat::kFp8E4m3:
    case KvFormat::kNvfp4:  // an E4M3 scale, never negative
      magnitude = 0x70;     // four exponent bits, bias 7
      break;
  }
  return static_cast<uint8_t>((before & 0x80) | magnitude);
}

}  // namespace

Result<PokeReport> poke_value(const ClientOptions& client_options, PoolOptions pool_options,
                              int32_t layer, int32_t block_id, int32_t offset_tokens) {
  auto client = Client::connect(client_options);
  if (!client) return client.status();
  pool_options.execution = Execution::kInProcess;  // the one that maps the memory
  auto pool = client->open_pool(pool_options);
  if (!pool) return pool.status();

  const AttentionGeometry& geometry = pool->geometry();
  LARDER_CHECK(layer >= 0 && layer < geometry.num_layers && block_id >= 0, layer, block_id);
  LARDER_CHECK(offset_tokens >= 0 && offset_tokens < geometry.block_tokens, offset_tokens);
  const PageLayout page = page_layout(geometry);
  const KvFormat format = geometry.v_format;
  int64_t offset_bytes = 0;  // in the page
  if (format == KvFormat::kNvfp4)
    offset_bytes +=
        page.v_scale_offset_bytes + offset_tokens * row_scale_bytes(format, geometry.v_dim);
  else
    offset_bytes +=
        page.v_data_offset_bytes + offset_tokens * row_data_bytes(format, geometry.v_dim);
  // Little-endian: the exponent of a 16-bit element is in its second byte.
  if (format == KvFormat::kBf16 || format == KvFormat::kFp16) offset_bytes += 1;

  // As a page, so that it may lie in a GPU.
  const std::array<int32_t, 1> block = {block_id};
  std::vector<std::byte> bytes(static_cast<size_t>(pool->page_bytes()));
  if (Status status = pool->read_pages(layer, block, bytes); !status.ok()) return status;
  std::byte& byte = bytes[static_cast<size_t>(offset_bytes)];
  PokeReport report;
  report.offset_bytes =
      block_id * pool->block_stride_bytes() + layer * pool->layer_stride_bytes() + offset_bytes;
  report.before = static_cast<uint8_t>(byte);
  report.after = enlarged(format, report.before);
  byte = static_cast<std::byte>(report.after);
  if (Status status = pool->write_pages(layer, block, bytes); !status.ok()) return status;
  return report;
}

}  // namespace larder::examples
