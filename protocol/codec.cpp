#include "protocol/codec.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include <kj/exception.h>

#include "larder/check.h"
#include "protocol/text.h"

namespace larder::protocol {

namespace {

uint32_t data_bits_of(capnp::schema::Type::Which type) {
  using Type = capnp::schema::Type;
  switch (type) {
    case Type::BOOL:
      return 1;
    case Type::INT8:
    case Type::UINT8:
      return 8;
    case Type::INT16:
    case Type::UINT16:
    case Type::ENUM:
      return 16;
    case Type::INT32:
    case Type::UINT32:
    case Type::FLOAT32:
      return 32;
    case Type::INT64:
    case Type::UINT64:
    case Type::FLOAT64:
      return 64;
    default:  // nothing, or a pointer
      return 0;
  }
}

// A field is aligned to its size, so it never straddles two words.
void mark(std::vector<uint64_t>& data_bits, uint32_t first_bit, uint32_t num_bits) {
  const uint64_t ones = num_bits == 64 ? ~uint64_t{0} : (uint64_t{1} << num_bits) - 1;
  if (num_bits != 0) data_bits.at(first_bit / 64) |= ones << first_bit % 64;
}

}  // namespace

KnownFields::KnownFields(capnp::StructSchema schema) {
  const auto node = schema.getProto().getStruct();
  num_pointers = node.getPointerCount();
  data_bits.resize(node.getDataWordCount());
  if (node.getDiscriminantCount() > 0) mark(data_bits, 16 * node.getDiscriminantOffset(), 16);
  for (const auto field : node.getFields()) {
    LARDER_CHECK(field.isSlot(), "the schema has no groups");
    const uint32_t size = data_bits_of(field.getSlot().getType().which());
    mark(data_bits, size * field.getSlot().getOffset(), size);
  }
}

std::string Reading::text(const char* field, capnp::Text::Reader value, size_t max_bytes) {
  if (value.size() > max_bytes) {
    refuse(std::string(field) + " has " + std::to_string(value.size()) + " bytes, at most " +
           std::to_string(max_bytes) + " are allowed");
    return {};
  }
  const std::string_view bytes(value.begin(), value.size());
  if (!is_printable(bytes)) {
    refuse(std::string(field) + " has a control character or is not UTF-8");
    return {};
  }
  return std::string(bytes);
}

std::string Reading::data(const char* field, capnp::Data::Reader value, size_t max_bytes) {
  if (value.size() > max_bytes) {
    refuse(std::string(field) + " has " + std::to_string(value.size()) + " bytes, at most " +
           std::to_string(max_bytes) + " are allowed");
    return {};
  }
  return {reinterpret_cast<const char*>(value.begin()), value.size()};
}

SessionToken Reading::session_token(capnp::Data::Reader value) {
  SessionToken token{};
  if (value.size() == token.size())
    std::memcpy(token.data(), value.begin(), token.size());
  else
    refuse("session_token has " + std::to_string(value.size()) + " bytes, not 32");
  return token;
}

int64_t Reading::number(const char* field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return value;
  refuse(std::string(field) + " is " + std::to_string(value) + ", " + std::to_string(min) + " to " +
         std::to_string(max) + " are allowed");
  return min;
}

uint64_t Reading::arena_bytes(uint64_t value) {
  if (value == 0 || (value >= kMinArenaBytes && value <= kMaxArenaBytes)) return value;
  refuse("arena_bytes is " + std::to_string(value) + ", 0 or " + std::to_string(kMinArenaBytes) +
         " to " + std::to_string(kMaxArenaBytes) + " are allowed");
  return 0;
}

uint32_t Reading::count(const char* field, size_t size, size_t max) {
  if (size > max) {
    refuse(std::string(field) + " has " + std::to_string(size) + " entries, at most " +
           std::to_string(max) + " are allowed");
    return 0;
  }
  return static_cast<uint32_t>(size);
}

bool Reading::has_more_than(capnp::AnyStruct::Reader reader, const KnownFields& known) {
  const auto data = reader.getDataSection();
  for (size_t i = 0; i < data.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data.begin() + i, std::min(sizeof word, data.size() - i));
    const size_t index = i / sizeof word;
    if ((word & ~(index < known.data_bits.size() ? known.data_bits[index] : 0)) != 0) return true;
  }
  const auto pointers = reader.getPointerSection();
  for (uint32_t i = known.num_pointers; i < pointers.size(); ++i)
    if (!pointers[i].isNull()) return true;
  return false;
}

Bytes finish(capnp::MessageBuilder& builder) {
  // A message that outgrew its first segment is copied into one: pointers between segments take
  // room of their own, and limits.h counts on the largest replies to have none.
  if (builder.getSegmentsForOutput().size() > 1) {
    const auto root = builder.getRoot<capnp::AnyPointer>().asReader();
    capnp::MallocMessageBuilder one_segment(
        static_cast<capnp::uint>(root.targetSize().wordCount + 1));
    one_segment.setRoot(root);
    return finish(one_segment);
  }
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
  // Every list is read once, so an honest message stays well below its own size. The factor leaves
  // room for walking a list twice, not for a message whose pointers all name the same bytes.
  options.traversalLimitInWords = 2 * kMaxMessageBytes / sizeof(capnp::word);
  options.nestingLimit = static_cast<int>(kMaxNestingLevels);
  // Cap'n Proto reports malformed bytes by throwing; this is where that becomes an answer.
  try {
    capnp::FlatArrayMessageReader reader(kj::arrayPtr(words.data(), words.size()), options);
    if (reader.getEnd() != words.data() + words.size())
      return {ErrorCode::kInvalidArgument,
              "a message of " + std::to_string(bytes.size()) + " bytes of which " +
                  std::to_string((reader.getEnd() - words.data()) * sizeof(capnp::word)) +
                  " are used"};
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
  for (uint32_t i = 0; i < blocks.size(); ++i) {
    reading.known_fields_only<wire::Block>(field, reader[i]);
    blocks[i] = {reader[i].getId(), reader[i].getGeneration()};
  }
  return blocks;
}

void write(wire::GroupLayout::Builder builder, const GroupLayout& layout) {
  builder.setBlockBytes(layout.block_bytes);
  builder.setBlockStrideBytes(layout.block_stride_bytes);
  builder.setLayerStrideBytes(layout.layer_stride_bytes);
  builder.setNumBlocks(layout.num_blocks);
  write_numbers(builder.initSegmentBytes(static_cast<uint32_t>(layout.segment_bytes.size())),
                layout.segment_bytes);
  builder.setMaxBlocks(layout.max_blocks);
  builder.setExtentBytes(layout.extent_bytes);
}

GroupLayout read_group_layout(Reading& reading, wire::GroupLayout::Reader reader) {
  reading.known_fields_only<wire::GroupLayout>("layout", reader);
  GroupLayout layout;
  layout.block_bytes = reader.getBlockBytes();
  layout.block_stride_bytes = reader.getBlockStrideBytes();
  layout.layer_stride_bytes = reader.getLayerStrideBytes();
  layout.num_blocks = reader.getNumBlocks();
  layout.segment_bytes =
      reading.numbers("segment_bytes", reader.getSegmentBytes(), kMaxSegmentsPerGroup);
  layout.max_blocks = reader.getMaxBlocks();
  layout.extent_bytes = reader.getExtentBytes();
  return layout;
}

void write(wire::Error::Builder builder, const Status& status) {
  builder.setCode(static_cast<uint16_t>(status.code()));
  builder.setMessage(printable(status.message(), kMaxErrorBytes));
}

Status read_error(Reading& reading, wire::Error::Reader reader) {
  reading.known_fields_only<wire::Error>("error", reader);
  const std::string message = reading.text("message", reader.getMessage(), kMaxErrorBytes);
  const uint16_t code = reader.getCode();
  if (code >= kNumErrorCodes)
    return {ErrorCode::kInternal, "unknown error code " + std::to_string(code) + ": " + message};
  return {static_cast<ErrorCode>(code), message};
}

}  // namespace larder::protocol
