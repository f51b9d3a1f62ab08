#include "allocator/block_key.h"

#include <bit>

#include <openssl/evp.h>

#include "larder/check.h"

namespace larder {
namespace {

// The bytes to be hashed, field by field.
class Fields {
 public:
  explicit Fields(std::string_view domain) { add(domain); }

  void add(std::string_view field) {
    add_length(field.size());
    bytes_.append(field);
  }
  void add(std::span<const int32_t> tokens) {
    add_length(tokens.size() * 4);
    static_assert(std::endian::native == std::endian::little);
    bytes_.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 4);
  }
  BlockKey digest() const {
    BlockKey key;
    unsigned int size_bytes = 0;
    // Found once: OpenSSL takes longer to look for an algorithm than to hash a block.
    static EVP_MD* const sha256 = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    LARDER_CHECK(sha256 != nullptr, "OpenSSL has no SHA256");
    const int ok =
        EVP_Digest(bytes_.data(), bytes_.size(), key.data(), &size_bytes, sha256, nullptr);
    LARDER_CHECK(ok == 1 && size_bytes == key.size(), ok, size_bytes);
    return key;
  }

 private:
  void add_length(uint64_t size_bytes) {
    bytes_.append(reinterpret_cast<const char*>(&size_bytes), sizeof size_bytes);
  }

  std::string bytes_;
};

}  // namespace

BlockKey root_key(std::string_view salt, std::string_view model, std::string_view adapter,
                  const Identity& identity) {
  Fields fields("larder.root.v1");
  fields.add(salt);
  fields.add(model);
  fields.add(adapter);
  for (const auto& [field, field_value] : identity) {
    fields.add(field);
    fields.add(field_value);
  }
  return fields.digest();
}

BlockKey child_key(const BlockKey& parent, std::span<const int32_t> tokens,
                   std::string_view extra) {
  Fields fields("larder.block.v1");
  fields.add(std::string_view(reinterpret_cast<const char*>(parent.data()), parent.size()));
  fields.add(tokens);
  fields.add(extra);
  return fields.digest();
}

}  // namespace larder
