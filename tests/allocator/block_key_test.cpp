#include "allocator/block_key.h"

#include <set>

#include <doctest/doctest.h>

namespace larder {
namespace {

std::string hex(const BlockKey& key) {
  std::string text;
  for (uint8_t byte : key) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

const Identity kIdentity = {{"k_format", "nvfp4"}, {"layers", "36"}};

// Made with Python, by nothing of ours:
//   import hashlib, struct
//   key = lambda *fields: hashlib.sha256(
//       b''.join(struct.pack('<Q', len(x)) + x for x in fields)).digest()
//   tokens = lambda *t: struct.pack('<%di' % len(t), *t)
//   root = key(b'larder.root.v1', b'salt', b'llama-3@main', b'lora-7',
//              b'k_format', b'nvfp4', b'layers', b'36')
//   first = key(b'larder.block.v1', root, tokens(1, 2, 3, 2147483647), b'image:1')
//   second = key(b'larder.block.v1', first, tokens(0, 0, 0, 0), b'')
TEST_CASE("keys are the same bytes in every process and release") {
  const BlockKey root = root_key("salt", "llama-3@main", "lora-7", kIdentity);
  CHECK(hex(root) == "089ac00917eef7f9ea0afdecd59b1bc8c69e530e054ac3c8388813f48a3a342e");
  const BlockKey first = child_key(root, std::vector<int32_t>{1, 2, 3, 2147483647}, "image:1");
  CHECK(hex(first) == "e8a84b74ad7585c372af7bf8a6d3a534bdd41344abdfd6a6e3ce1f5826c298e7");
  const BlockKey second = child_key(first, std::vector<int32_t>{0, 0, 0, 0}, "");
  CHECK(hex(second) == "f2773178344e03d51104c10a39ecf0c904b7d6fa643033e1aa2fe70944f47218");
}

TEST_CASE("no two different statements share a key") {
  const std::vector<int32_t> tokens = {1, 2};
  const BlockKey root = root_key("salt", "model", "", kIdentity);
  const std::set<BlockKey> keys = {
      root,
      root_key("salT", "model", "", kIdentity),
      root_key("salt", "mode", "l", kIdentity),
      root_key("saltmodel", "", "", kIdentity),
      root_key("salt", "model", "", {}),
      root_key("salt", "model", "", {{"k_formatnvfp4", ""}, {"layers", "36"}}),
      root_key("salt", "model", "", {{"layers", "36"}, {"k_format", "nvfp4"}}),
      child_key(root, tokens, ""),
      child_key(root, std::vector<int32_t>{2, 1}, ""),
      child_key(root, std::vector<int32_t>{1}, std::string_view("\2\0\0\0", 4)),
      child_key(root, std::vector<int32_t>{1, 2, 0}, ""),
      child_key(root, tokens, "x"),
      child_key(child_key(root, tokens, ""), tokens, ""),
  };
  CHECK(keys.size() == 13);
}

}  // namespace
}  // namespace larder
