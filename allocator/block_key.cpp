#include "allocator/block_key.h"

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
    for (int32_t token : tokens) add_little_endian(static_cast<uint32_t>(token), 4);
  }
  BlockKey digest() const {
    BlockKey key;
    unsigned int size_bytes = 0;
    const int ok =
        EVP_Digest(bytes_.data(), bytes_.size(), key.data(), &size_bytes, EVP_sha256(), nullptr);
    LARDER_CHECK(ok == 1 && size_bytes == key.size(), ok, size_bytes);
    return key;
  }

 private:
  void add_length(uint64_t size_bytes) { add_little_endian(size_bytes, 8); }
  void add_little_endian(uint64_t number, int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) bytes_.push_back(static_cast<char>(number >> 8 * i));
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
