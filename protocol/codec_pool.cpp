// Codec of pool descriptions, which clients send to larderd and larderd to the executor.
#include "protocol/codec.h"

namespace larder::protocol {
namespace {

void write(wire::AttentionGroup::Builder builder, const AttentionGroup& group) {
  builder.setNumLayers(group.num_layers);
  builder.setNumKvHeads(group.num_kv_heads);
  builder.setKDim(group.k_dim);
  builder.setVDim(group.v_dim);
  builder.setKFormat(group.k_format);
  builder.setVFormat(group.v_format);
  builder.setEncoder(group.encoder);
  builder.setKeyTransform(group.key_transform);
  write_numbers(builder.initKScales(static_cast<uint32_t>(group.k_scales.size())), group.k_scales);
  write_numbers(builder.initVScales(static_cast<uint32_t>(group.v_scales.size())), group.v_scales);
  builder.setWindowTokens(group.window_tokens);
  write_list(builder.initKeyOffsets(), group.key_offsets);
}

AttentionGroup read_attention(Reading& reading, wire::AttentionGroup::Reader reader) {
  reading.known_fields_only<wire::AttentionGroup>("attention", reader);
  AttentionGroup group;
  group.num_layers = reader.getNumLayers();
  group.num_kv_heads = reader.getNumKvHeads();
  group.k_dim = reader.getKDim();
  group.v_dim = reader.getVDim();
  group.k_format = reading.text("k_format", reader.getKFormat());
  group.v_format = reading.text("v_format", reader.getVFormat());
  group.encoder = reading.text("encoder", reader.getEncoder());
  group.key_transform = reading.text("key_transform", reader.getKeyTransform());
  group.k_scales = reading.numbers("k_scales", reader.getKScales(), kMaxLayers);
  group.v_scales = reading.numbers("v_scales", reader.getVScales(), kMaxLayers);
  group.window_tokens = reader.getWindowTokens();
  group.key_offsets = read_list<wire::FloatList, float>(
      reading, "key_offsets", reader.getKeyOffsets(), kMaxFloatsInline, kMaxFloatsInArena);
  return group;
}

MlaGroup read_mla(Reading& reading, wire::MlaGroup::Reader reader) {
  reading.known_fields_only<wire::MlaGroup>("mla", reader);
  return {reader.getNumLayers(), reading.text("row_format", reader.getRowFormat()),
          reading.numbers("k_scales", reader.getKScales(), kMaxLayers)};
}

OpaqueGroup read_opaque(Reading& reading, wire::OpaqueGroup::Reader reader) {
  reading.known_fields_only<wire::OpaqueGroup>("opaque", reader);
  return {reader.getBlockBytes()};
}

}  // namespace

void write(wire::GroupSpec::Builder builder, const GroupSpec& spec) {
  builder.setName(spec.name);
  builder.setBlockTokens(spec.block_tokens);
  builder.setNumBlocks(spec.num_blocks);
  builder.setMaxBlocks(spec.max_blocks);
  builder.setLayout(spec.layout);
  builder.setReserveBlockZero(spec.reserve_block_zero);
  write_numbers(builder.initLayerAliases(static_cast<uint32_t>(spec.layer_aliases.size())),
                spec.layer_aliases);
  if (const auto* attention = std::get_if<AttentionGroup>(&spec.kind)) {
    write(builder.initAttention(), *attention);
  } else if (const auto* mla = std::get_if<MlaGroup>(&spec.kind)) {
    auto group = builder.initMla();
    group.setNumLayers(mla->num_layers);
    group.setRowFormat(mla->row_format);
    write_numbers(group.initKScales(static_cast<uint32_t>(mla->k_scales.size())), mla->k_scales);
  } else {
    builder.initOpaque().setBlockBytes(std::get<OpaqueGroup>(spec.kind).block_bytes);
  }
  builder.setSegmentBytes(spec.segment_bytes);
}

GroupSpec read_group_spec(Reading& reading, wire::GroupSpec::Reader reader) {
  reading.known_fields_only<wire::GroupSpec>("group", reader);
  GroupSpec spec;
  spec.name = reading.text("group.name", reader.getName());
  spec.block_tokens = reader.getBlockTokens();
  spec.num_blocks = reader.getNumBlocks();
  spec.max_blocks = reader.getMaxBlocks();
  spec.layout = reading.text("layout", reader.getLayout());
  spec.reserve_block_zero = reader.getReserveBlockZero();
  spec.layer_aliases = reading.numbers("layer_aliases", reader.getLayerAliases(), kMaxLayers);
  spec.segment_bytes = reader.getSegmentBytes();
  switch (reader.which()) {
    case wire::GroupSpec::ATTENTION:
      spec.kind = read_attention(reading, reader.getAttention());
      return spec;
    case wire::GroupSpec::MLA:
      spec.kind = read_mla(reading, reader.getMla());
      return spec;
    case wire::GroupSpec::OPAQUE:
      spec.kind = read_opaque(reading, reader.getOpaque());
      return spec;
  }
  reading.refuse("group kind " + std::to_string(static_cast<int>(reader.which())) +
                 " is unknown; known are attention, mla and opaque");
  return spec;
}

void write(wire::RegisterImport::Builder builder, const RegisterImport& memory) {
  builder.setSizeBytes(memory.size_bytes);
  builder.setKind(memory.kind);
  builder.setHandle(
      kj::arrayPtr(reinterpret_cast<const kj::byte*>(memory.handle.data()), memory.handle.size()));
  builder.setOffsetBytes(memory.offset_bytes);
}

RegisterImport read_register_import(Reading& reading, wire::RegisterImport::Reader reader) {
  reading.known_fields_only<wire::RegisterImport>("register_import", reader);
  RegisterImport memory{reader.getSizeBytes(), reading.text("kind", reader.getKind()),
                        reading.data("handle", reader.getHandle(), kIpcHandleBytes),
                        reader.getOffsetBytes()};
  if (memory.size_bytes == 0 || memory.size_bytes > kMaxImportBytes ||
      memory.offset_bytes > kMaxImportBytes)
    reading.refuse("size_bytes is " + std::to_string(memory.size_bytes) + " and offset_bytes " +
                   std::to_string(memory.offset_bytes) + ": expected 1 to " +
                   std::to_string(kMaxImportBytes) + ", and at most that");
  return memory;
}

void write(wire::PoolSpec::Builder builder, const PoolSpec& spec) {
  builder.setName(spec.name);
  builder.setModel(spec.model);
  if (!spec.device.empty()) builder.setDevice(spec.device);
  auto groups = builder.initGroups(static_cast<uint32_t>(spec.groups.size()));
  for (uint32_t i = 0; i < spec.groups.size(); ++i) write(groups[i], spec.groups[i]);
}

PoolSpec read_pool_spec(Reading& reading, wire::PoolSpec::Reader reader) {
  reading.known_fields_only<wire::PoolSpec>("pool", reader);
  PoolSpec spec;
  spec.name = reading.text("pool.name", reader.getName());
  spec.model = reading.text("model", reader.getModel());
  spec.device = reading.text("device", reader.getDevice());
  const auto groups = reader.getGroups();
  spec.groups.resize(reading.count("groups", groups.size(), kMaxGroups));
  for (uint32_t i = 0; i < spec.groups.size(); ++i)
    spec.groups[i] = read_group_spec(reading, groups[i]);
  return spec;
}

}  // namespace larder::protocol
