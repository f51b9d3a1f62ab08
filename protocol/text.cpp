#include "protocol/text.h"

#include <cstdint>

namespace larder::protocol {
namespace {

// The bytes of the printable character at the start of `text`, which is not empty; 0 when there is
// none. RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return lead >= 0x20 && lead != 0x7f ? 1 : 0;
  const size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < size) return 0;
  uint32_t code = lead & (0x7fu >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fu);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0xa0, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  return code >= kSmallest[size] && code <= 0x10ffff && !surrogate ? size : 0;
}

}  // namespace

bool is_printable(std::string_view text) {
  while (!text.empty()) {
    const size_t size = character_bytes(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

std::string printable(std::string_view text, size_t max_bytes) {
  std::string result;
  while (!text.empty()) {
    const size_t size = character_bytes(text);
    const std::string_view character = size == 0 ? std::string_view("?") : text.substr(0, size);
    if (result.size() + character.size() > max_bytes) break;
    result += character;
    text.remove_prefix(size == 0 ? 1 : size);
  }
  return result;
}

}  // namespace larder::protocol
