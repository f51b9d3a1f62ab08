// Codec of replies.
#include <cstring>

#include "protocol/codec.h"

namespace larder::protocol {
namespace {

uint32_t size32(size_t size) { return static_cast<uint32_t>(size); }

struct Writer {
  wire::Reply::Builder out;

  void operator()(const Status& body) { protocol::write(out.initError(), body); }
  void operator()(const Done&) { out.setDone(); }
  void operator()(const Connected& body) {
    auto to = out.initConnected();
    to.setVersion(body.version);
    to.setSession(body.session);
    to.setSessionToken(kj::arrayPtr(body.session_token.data(), body.session_token.size()));
    to.setArenaBytes(body.arena_bytes);
    to.setCacheId(body.cache_id);
  }
  void operator()(const PoolOpened& body) {
    auto to = out.initPoolOpened();
    to.setPool(body.pool);
    to.setCreated(body.created);
    auto groups = to.initGroups(size32(body.groups.size()));
    for (uint32_t i = 0; i < body.groups.size(); ++i) write(groups[i], body.groups[i]);
    to.setDevice(body.device);
    to.setOnRequest(body.on_request);
  }
  void operator()(const Imported& body) { out.setImported(body.import_id); }
  void operator()(const Segments& body) {
    write_numbers(out.initSegments(size32(body.size_bytes.size())), body.size_bytes);
  }
  void operator()(const Blocks& body) {
    write(out.initBlocks(size32(body.blocks.size())), body.blocks);
  }
  void operator()(const Published& body) {
    auto to = out.initPublished();
    auto keys = to.initKeys(size32(32 * body.blocks.size()));
    auto blocks = to.initBlocks(size32(body.blocks.size()));
    for (uint32_t i = 0; i < body.blocks.size(); ++i) {
      std::memcpy(keys.begin() + size_t{32} * i, body.blocks[i].key.data(), 32);
      write(blocks[i], body.blocks[i].block);
    }
  }
  void operator()(const Prefix& body) {
    auto to = out.initPrefix();
    to.setHitTokens(body.hit_tokens);
    write(to.initBlocks(size32(body.blocks.size())), body.blocks);
  }
  void operator()(const Pools& body) {
    auto to = out.initPools();
    to.setMore(body.more);
    auto pools = to.initPools(size32(body.pools.size()));
    for (uint32_t i = 0; i < body.pools.size(); ++i) write(pools[i], body.pools[i]);
  }
  void operator()(const Sessions& body) {
    auto to = out.initSessions();
    to.setMore(body.more);
    auto sessions = to.initSessions(size32(body.sessions.size()));
    for (uint32_t i = 0; i < body.sessions.size(); ++i) write(sessions[i], body.sessions[i]);
  }
  void operator()(const DaemonStatus& body) { write(out.initStatus(), body); }
  void operator()(const Resized& body) {
    auto to = out.initResized();
    to.setBlocksBefore(body.blocks_before);
    to.setBlocksAfter(body.blocks_after);
    to.setBytesBefore(body.bytes_before);
    to.setBytesAfter(body.bytes_after);
  }
  void operator()(const Tenants& body) {
    auto tenants = out.initTenants(size32(body.tenants.size()));
    for (uint32_t i = 0; i < body.tenants.size(); ++i) write(tenants[i], body.tenants[i]);
  }
  void operator()(const Capabilities& body) {
    auto rows = out.initCapabilities(size32(body.rows.size()));
    for (uint32_t i = 0; i < body.rows.size(); ++i) {
      rows[i].setOp(body.rows[i].op);
      rows[i].setBackend(body.rows[i].backend);
      rows[i].setKFormat(body.rows[i].k_format);
      rows[i].setVFormat(body.rows[i].v_format);
      rows[i].setDimMultiple(body.rows[i].dim_multiple);
      rows[i].setDimMax(body.rows[i].dim_max);
    }
  }
};

Connected read_connected(Reading& reading, wire::Connected::Reader from) {
  reading.known_fields_only<wire::Connected>("connected", from);
  return {from.getVersion(), from.getSession(), reading.session_token(from.getSessionToken()),
          from.getArenaBytes(), from.getCacheId()};
}

PoolOpened read_pool_opened(Reading& reading, wire::PoolOpened::Reader from) {
  reading.known_fields_only<wire::PoolOpened>("pool_opened", from);
  PoolOpened body{from.getPool(), from.getCreated(), {}};
  const auto groups = from.getGroups();
  body.groups.resize(reading.count("groups", groups.size(), kMaxGroups));
  size_t num_segments = 0;
  for (uint32_t i = 0; i < body.groups.size(); ++i) {
    body.groups[i] = read_group_layout(reading, groups[i]);
    num_segments += body.groups[i].segment_bytes.size();
  }
  body.device = reading.text("device", from.getDevice());
  body.on_request = from.getOnRequest();
  reading.count("segment_bytes of all groups", num_segments, kMaxSegmentsPerPool);
  return body;
}

Published read_published(Reading& reading, wire::Published::Reader from) {
  reading.known_fields_only<wire::Published>("published", from);
  Published body;
  const auto blocks = read_blocks(reading, "published", from.getBlocks(), kMaxBlocksPerPublish);
  const auto keys = from.getKeys();
  if (keys.size() != 32 * blocks.size()) {
    reading.refuse("keys has " + std::to_string(keys.size()) + " bytes, not " +
                   std::to_string(32 * blocks.size()));
    return body;
  }
  body.blocks.resize(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    std::memcpy(body.blocks[i].key.data(), keys.begin() + 32 * i, 32);
    body.blocks[i].block = blocks[i];
  }
  return body;
}

Pools read_pools(Reading& reading, wire::Pools::Reader from) {
  reading.known_fields_only<wire::Pools>("pools", from);
  Pools body;
  body.more = from.getMore();
  const auto pools = from.getPools();
  body.pools.resize(reading.count("pools", pools.size(), kMaxPools));
  for (uint32_t i = 0; i < body.pools.size(); ++i)
    body.pools[i] = read_pool_info(reading, pools[i]);
  return body;
}

Sessions read_sessions(Reading& reading, wire::Sessions::Reader from) {
  reading.known_fields_only<wire::Sessions>("sessions", from);
  Sessions body;
  body.more = from.getMore();
  const auto sessions = from.getSessions();
  body.sessions.resize(reading.count("sessions", sessions.size(), kMaxSessionsPerPage));
  for (uint32_t i = 0; i < body.sessions.size(); ++i)
    body.sessions[i] = read_session_info(reading, sessions[i]);
  return body;
}

Resized read_resized(Reading& reading, wire::Resized::Reader from) {
  reading.known_fields_only<wire::Resized>("resized", from);
  return {from.getBlocksBefore(), from.getBlocksAfter(), from.getBytesBefore(),
          from.getBytesAfter()};
}

Tenants read_tenants(Reading& reading, capnp::List<wire::TenantInfo>::Reader from) {
  Tenants body;
  body.tenants.resize(reading.count("tenants", from.size(), kMaxTenants));
  for (uint32_t i = 0; i < body.tenants.size(); ++i)
    body.tenants[i] = read_tenant_info(reading, from[i]);
  return body;
}

Capabilities read_capabilities(Reading& reading, capnp::List<wire::Capability>::Reader from) {
  Capabilities body;
  body.rows.resize(reading.count("capabilities", from.size(), kMaxCapabilities));
  for (uint32_t i = 0; i < body.rows.size(); ++i) {
    reading.known_fields_only<wire::Capability>("capabilities", from[i]);
    body.rows[i] = {
        reading.text("capability.op", from[i].getOp(), kMaxCapabilityTextBytes),
        reading.text("capability.backend", from[i].getBackend(), kMaxCapabilityTextBytes),
        reading.text("capability.k_format", from[i].getKFormat(), kMaxCapabilityTextBytes),
        reading.text("capability.v_format", from[i].getVFormat(), kMaxCapabilityTextBytes),
        from[i].getDimMultiple(),
        from[i].getDimMax()};
  }
  return body;
}

ReplyBody read_body(Reading& reading, wire::Reply::Reader reader) {
  switch (reader.which()) {
    case wire::Reply::ERROR: {
      const Status status = read_error(reading, reader.getError());
      if (status.ok()) reading.refuse("an error reply carries the code OK");
      return status;
    }
    case wire::Reply::DONE:
      return Done{};
    case wire::Reply::CONNECTED:
      return read_connected(reading, reader.getConnected());
    case wire::Reply::POOL_OPENED:
      return read_pool_opened(reading, reader.getPoolOpened());
    case wire::Reply::SEGMENTS:
      return Segments{reading.numbers("segments", reader.getSegments(), kMaxFdsPerMessage)};
    case wire::Reply::BLOCKS:
      return Blocks{read_blocks(reading, "blocks", reader.getBlocks(), kMaxBlocksPerMessage)};
    case wire::Reply::PUBLISHED:
      return read_published(reading, reader.getPublished());
    case wire::Reply::PREFIX: {
      const auto from = reader.getPrefix();
      reading.known_fields_only<wire::Prefix>("prefix", from);
      return Prefix{from.getHitTokens(),
                    read_blocks(reading, "blocks", from.getBlocks(), kMaxBlocksPerMessage)};
    }
    case wire::Reply::POOLS:
      return read_pools(reading, reader.getPools());
    case wire::Reply::SESSIONS:
      return read_sessions(reading, reader.getSessions());
    case wire::Reply::STATUS:
      return read_status(reading, reader.getStatus());
    case wire::Reply::CAPABILITIES:
      return read_capabilities(reading, reader.getCapabilities());
    case wire::Reply::RESIZED:
      return read_resized(reading, reader.getResized());
    case wire::Reply::TENANTS:
      return read_tenants(reading, reader.getTenants());
    case wire::Reply::IMPORTED:
      return Imported{reader.getImported()};
  }
  reading.refuse("reply kind " + std::to_string(static_cast<int>(reader.which())) + " is unknown");
  return Done{};
}

}  // namespace

Bytes encode(const Reply& reply) {
  capnp::MallocMessageBuilder builder;
  auto out = builder.initRoot<wire::Reply>();
  out.setId(reply.id);
  out.setBootId(reply.boot_id);
  std::visit(Writer{out}, reply.body);
  return finish(builder);
}

Result<Reply> decode_reply(std::span<const std::byte> bytes) {
  Reply reply;
  const Status status = read_message(bytes, [&](capnp::MessageReader& message) {
    const auto reader = message.getRoot<wire::Reply>();
    Reading reading;
    reading.known_fields_only<wire::Reply>("reply", reader);
    reply.id = reader.getId();
    reply.boot_id = reader.getBootId();
    reply.body = read_body(reading, reader);
    return reading.status();
  });
  if (!status.ok()) return status;
  return reply;
}

}  // namespace larder::protocol
