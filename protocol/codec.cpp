#include "protocol/codec.h"

#include <cstring>

#include <kj/exception.h>

#include "larder/check.h"

namespace larder::protocol {

std::string Reading::text(const char* field, capnp::Text::Reader value, size_t max_bytes) {
  if (value.size() > max_bytes) {
    refuse(std::string(field) + " has " + std::to_string(value.size()) + " bytes, at most " +
           std::to_string(max_bytes) + " are allowed");
    return {};
  }
  for (const char c : value) {
    if (static_cast<unsigned char>(c) < 0x20) {
      refuse(std::string(field) + " has a control character");
      return {};
    }
  }
  return {value.begin(), value.size()};
}

std::string Reading::data(const char* field, capnp::Data::Reader value, size_t max_bytes) {
  if (value.size() > max_bytes) {
    refuse(std::string(field) + " has " + std::to_string(value.size()) + " bytes, at most " +
           std::to_string(max_bytes) + " are allowed");
    return {};
  }
  return {reinterpret_cast<const char*>(value.begin()), value.size()};
}

uint32_t Reading::count(const char* field, size_t size, size_t max) {
  if (size > max) {
    refuse(std::string(field) + " has " + std::to_string(size) + " entries, at most " +
           std::to_string(max) + " are allowed");
    return 0;
  }
  return static_cast<uint32_t>(size);
}

bool Reading::has_more_than(capnp::AnyStruct::Reader reader, uint32_t data_words,
                            uint32_t pointers) {
  const auto data = reader.getDataSection();
  for (size_t i = size_t{data_words} * sizeof(capnp::word); i < data.size(); ++i)
    if (data[i] != 0) return true;
  const auto pointer_section = reader.getPointerSection();
  for (uint32_t i = pointers; i < pointer_section.size(); ++i)
    if (!pointer_section[i].isNull()) return true;
  return false;
}

Bytes finish(capnp::MessageBuilder& builder) {
  const auto words = capnp::messageToFlatArray(builder);
  const auto bytes = words.asBytes();
  Bytes result(bytes.size());
  std::memcpy(result.data(), bytes.begin(), bytes.size());
  return result;
}

Status read_message(std::span<const std::byte> bytes,
                    const std::function<Status(capnp::MessageReader&)>& read) {
  if (bytes.empty() || bytes.size() % sizeof(capnp::word) != 0 || bytes.size() > kMaxMessageBytes)
    return {ErrorCode::kInvalidArgument,
            "a message of " + std::to_string(bytes.size()) +
                " bytes: the size must be a multiple of 8, not 0, and at most " +
                std::to_string(kMaxMessageBytes)};
  std::vector<capnp::word> words(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.data(), bytes.data(), bytes.size());
  capnp::ReaderOptions options;
  // Lists of empty structs and repeated pointers may be walked for more than the message's size.
  options.traversalLimitInWords = 8 * kMaxMessageBytes / sizeof(capnp::word);
  options.nestingLimit = static_cast<int>(kMaxNestingLevels);
  // Cap'n Proto reports malformed bytes by throwing; this is where that becomes an answer.
  try {
    capnp::FlatArrayMessageReader reader(kj::arrayPtr(words.data(), words.size()), options);
    return read(reader);
  } catch (const kj::Exception& error) {
    return {ErrorCode::kInvalidArgument,
            std::string("malformed message: ") + error.getDescription().cStr()};
  }
}

void write(wire::Block::Builder builder, const Block& block) {
  builder.setId(block.id);
  builder.setGeneration(block.generation);
}

void write(capnp::List<wire::Block>::Builder builder, const std::vector<Block>& blocks) {
  for (uint32_t i = 0; i < blocks.size(); ++i) write(builder[i], blocks[i]);
}

std::vector<Block> read_blocks(Reading& reading, const char* field,
                               capnp::List<wire::Block>::Reader reader, size_t max) {
  std::vector<Block> blocks(reading.count(field, reader.size(), max));
  for (uint32_t i = 0; i < blocks.size(); ++i)
    blocks[i] = {reader[i].getId(), reader[i].getGeneration()};
  return blocks;
}

void write(wire::GroupLayout::Builder builder, const GroupLayout& layout) {
  builder.setBlockBytes(layout.block_bytes);
  builder.setBlockStrideBytes(layout.block_stride_bytes);
  builder.setLayerStrideBytes(layout.layer_stride_bytes);
  builder.setNumBlocks(layout.num_blocks);
  write_numbers(builder.initSegmentBytes(static_cast<uint32_t>(layout.segment_bytes.size())),
                layout.segment_bytes);
}

GroupLayout read_group_layout(Reading& reading, wire::GroupLayout::Reader reader) {
  reading.known_fields_only<wire::GroupLayout>("layout", reader);
  GroupLayout layout;
  layout.block_bytes = reader.getBlockBytes();
  layout.block_stride_bytes = reader.getBlockStrideBytes();
  layout.layer_stride_bytes = reader.getLayerStrideBytes();
  layout.num_blocks = reader.getNumBlocks();
  layout.segment_bytes =
      reading.numbers("segmentBytes", reader.getSegmentBytes(), kMaxSegmentsPerGroup);
  return layout;
}

void write(wire::Error::Builder builder, const Status& status) {
  builder.setCode(static_cast<uint16_t>(status.code()));
  builder.setMessage(status.message().substr(0, kMaxErrorBytes));
}

Status read_error(Reading& reading, wire::Error::Reader reader) {
  const std::string message = reading.text("message", reader.getMessage(), kMaxErrorBytes);
  const uint16_t code = reader.getCode();
  if (code >= kNumErrorCodes)
    return {ErrorCode::kInternal, "unknown error code " + std::to_string(code) + ": " + message};
  return {static_cast<ErrorCode>(code), message};
}

}  // namespace larder::protocol
