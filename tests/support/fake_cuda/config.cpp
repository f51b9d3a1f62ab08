#include "tests/support/fake_cuda/config.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace fake_cuda {
namespace {

int digit_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// "GPU-" or "MIG-" and lower-case digits with dashes anywhere.
larder::cuda::Uuid parse_uuid(std::string_view text) {
  if (text.starts_with("GPU-") || text.starts_with("MIG-")) text.remove_prefix(4);
  larder::cuda::Uuid uuid{};
  size_t digits = 0;
  for (const char c : text) {
    if (digit_value(c) < 0 || digits >= 2 * sizeof uuid.bytes) continue;
    uuid.bytes[digits / 2] =
        static_cast<unsigned char>(uuid.bytes[digits / 2] << 4 | digit_value(c));
    ++digits;
  }
  return uuid;
}

larder::cuda::Uuid made_up_uuid(size_t ordinal) {
  larder::cuda::Uuid uuid = parse_uuid("fa4e0000-cda0-4000-8000-000000000000");
  uuid.bytes[15] = static_cast<unsigned char>(ordinal);
  return uuid;
}

}  // namespace

int64_t environment_number(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoll(text, nullptr, 10);
}

std::optional<Config> read_config() {
  Config config;
  const char* const folder = std::getenv("FAKE_CUDA_DIR");
  if (folder == nullptr) {
    std::fputs("fake_cuda: FAKE_CUDA_DIR is not set; it must name a folder\n", stderr);
    return std::nullopt;
  }
  config.folder = folder;
  const char* const named = std::getenv("FAKE_CUDA_UUIDS");
  std::string_view rest = named == nullptr ? "" : named;
  const int64_t devices = environment_number("FAKE_CUDA_DEVICES", 1);
  for (int64_t ordinal = 0; ordinal < devices; ++ordinal) {
    const std::string_view text = rest.substr(0, rest.find(','));
    rest.remove_prefix(text.size() < rest.size() ? text.size() + 1 : rest.size());
    config.uuids.push_back(text.empty() ? made_up_uuid(static_cast<size_t>(ordinal))
                                        : parse_uuid(text));
  }
  config.memory_bytes = environment_number("FAKE_CUDA_MEMORY_MIB", 1024) << 20;
  config.granularity_bytes = environment_number("FAKE_CUDA_GRANULARITY_KIB", 2048) << 10;
  config.reclaim_ms = environment_number("FAKE_CUDA_RECLAIM_MS", 0);
  const char* const without = std::getenv("FAKE_CUDA_WITHOUT");
  config.without = without == nullptr ? "" : without;
  return config;
}

}  // namespace fake_cuda
