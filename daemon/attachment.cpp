#include "daemon/attachment.h"

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "allocator/byte_codec.h"

namespace larder::daemon {
namespace {

std::string to_text(const ByteWriter& out) {
  const auto bytes = out.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

Status foreign(const char* what, const std::string& attachment) {
  return {ErrorCode::kInternal, "the journal describes a " + std::string(what) + " in " +
                                    std::to_string(attachment.size()) +
                                    " bytes that this build does not understand"};
}

// Floats have no order of bytes of their own: their bits are kept.
std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

std::vector<float> floats_of(const std::vector<uint32_t>& bits) {
  std::vector<float> values(bits.size());
  if (!bits.empty()) std::memcpy(values.data(), bits.data(), bits.size() * sizeof(float));
  return values;
}

}  // namespace

std::string to_attachment(const SessionRecord& record) {
  ByteWriter out;
  out.put(record.token);
  out.put(record.pid);
  out.put(record.uid);
  out.put(record.gid);
  out.put_text(record.client_name);
  out.put(record.arena_bytes);
  out.put(static_cast<uint8_t>(record.notices));
  return to_text(out);
}

Result<SessionRecord> session_record(const std::string& attachment) {
  ByteReader in(bytes_of(attachment));
  SessionRecord record;
  record.token = in.get<protocol::SessionToken>();
  record.pid = in.get<pid_t>();
  record.uid = in.get<uid_t>();
  record.gid = in.get<gid_t>();
  record.client_name = in.get_text();
  record.arena_bytes = in.get<uint64_t>();
  record.notices = in.get_bool();
  if (!in.at_end()) return foreign("session", attachment);
  return record;
}

// The wire's own message, and the key offsets beside it: they can be too many for a message.
std::string to_attachment(const protocol::PoolSpec& spec) {
  ByteWriter out;
  protocol::PoolSpec bare = spec;
  out.put(static_cast<uint32_t>(bare.groups.size()));
  for (protocol::GroupSpec& group : bare.groups) {
    std::vector<float> offsets;
    if (auto* attention = std::get_if<protocol::AttentionGroup>(&group.kind))
      offsets =
          std::get<std::vector<float>>(std::exchange(attention->key_offsets, std::vector<float>()));
    out.put_list(bits_of(offsets));
  }
  const protocol::Bytes message = encode(protocol::Request{1, 0, protocol::OpenPool{bare}});
  out.put_list(
      std::vector<uint8_t>(reinterpret_cast<const uint8_t*>(message.data()),
                           reinterpret_cast<const uint8_t*>(message.data()) + message.size()));
  return to_text(out);
}

Result<protocol::PoolSpec> pool_spec(const std::string& attachment) {
  ByteReader in(bytes_of(attachment));
  std::vector<std::vector<float>> offsets(in.count_of(sizeof(uint32_t)));
  for (std::vector<float>& of_group : offsets) of_group = floats_of(in.get_list<uint32_t>());
  const std::vector<uint8_t> message = in.get_list<uint8_t>();
  if (!in.at_end()) return foreign("pool", attachment);
  protocol::DecodedRequest decoded = protocol::decode_request(std::as_bytes(std::span(message)));
  if (!decoded.request) return foreign("pool", attachment);
  auto* open = std::get_if<protocol::OpenPool>(&decoded.request->body);
  if (open == nullptr || open->spec.groups.size() != offsets.size())
    return foreign("pool", attachment);
  for (size_t i = 0; i < offsets.size(); ++i)
    if (auto* attention = std::get_if<protocol::AttentionGroup>(&open->spec.groups[i].kind))
      attention->key_offsets = std::move(offsets[i]);
  return std::move(open->spec);
}

}  // namespace larder::daemon
