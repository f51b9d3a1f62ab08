// Codec of replies.
#include <cstring>

#include "protocol/codec.h"

namespace larder::protocol {
namespace {

uint32_t size32(size_t size) { return static_cast<uint32_t>(size); }

void write(wire::GroupInfo::Builder to, const GroupInfo& group) {
  to.setName(group.name);
  to.setCapacity(group.capacity);
  to.setFree(group.free);
  to.setOpen(group.open);
  to.setPublished(group.published);
  to.setCached(group.cached);
  to.setQuarantined(group.quarantined);
  to.setPhysicalBytes(group.physical_bytes);
  to.setUsedBytes(group.used_bytes);
  to.setSlackBytes(group.slack_bytes);
}

GroupInfo read_group_info(Reading& reading, wire::GroupInfo::Reader from) {
  reading.known_fields_only<wire::GroupInfo>("group", from);
  GroupInfo group;
  group.name = reading.text("group.name", from.getName());
  group.capacity = from.getCapacity();
  group.free = from.getFree();
  group.open = from.getOpen();
  group.published = from.getPublished();
  group.cached = from.getCached();
  group.quarantined = from.getQuarantined();
  group.physical_bytes = from.getPhysicalBytes();
  group.used_bytes = from.getUsedBytes();
  group.slack_bytes = from.getSlackBytes();
  return group;
}

void write(wire::PoolInfo::Builder to, const PoolInfo& pool) {
  to.setPool(pool.pool);
  to.setTenant(pool.tenant);
  to.setName(pool.name);
  to.setModel(pool.model);
  auto identity = to.initIdentity(size32(pool.identity.size()));
  for (uint32_t i = 0; i < pool.identity.size(); ++i) {
    identity[i].setName(pool.identity[i].first);
    identity[i].setValue(pool.identity[i].second);
  }
  to.setNumSessions(pool.num_sessions);
  auto groups = to.initGroups(size32(pool.groups.size()));
  for (uint32_t i = 0; i < pool.groups.size(); ++i) write(groups[i], pool.groups[i]);
  to.setAllocatedBlocksTotal(pool.allocated_blocks_total);
  to.setEvictedBlocksTotal(pool.evicted_blocks_total);
  to.setPublishedBlocksTotal(pool.published_blocks_total);
  to.setLookupTokensTotal(pool.lookup_tokens_total);
  to.setLookupHitTokensTotal(pool.lookup_hit_tokens_total);
  to.setAppendedTokensTotal(pool.appended_tokens_total);
  to.setAttendedRowsTotal(pool.attended_rows_total);
}

PoolInfo read_pool_info(Reading& reading, wire::PoolInfo::Reader from) {
  reading.known_fields_only<wire::PoolInfo>("pool", from);
  PoolInfo pool;
  pool.pool = from.getPool();
  pool.tenant = reading.text("tenant", from.getTenant());
  pool.name = reading.text("pool.name", from.getName());
  pool.model = reading.text("model", from.getModel());
  const auto identity = from.getIdentity();
  pool.identity.resize(reading.count("identity", identity.size(), kMaxIdentityFields));
  for (uint32_t i = 0; i < pool.identity.size(); ++i) {
    reading.known_fields_only<wire::Pair>("identity", identity[i]);
    pool.identity[i] = {
        reading.text("identity.name", identity[i].getName()),
        reading.text("identity.value", identity[i].getValue(), kMaxIdentityValueBytes)};
  }
  pool.num_sessions = from.getNumSessions();
  const auto groups = from.getGroups();
  pool.groups.resize(reading.count("groups", groups.size(), kMaxGroups));
  for (uint32_t i = 0; i < pool.groups.size(); ++i)
    pool.groups[i] = read_group_info(reading, groups[i]);
  pool.allocated_blocks_total = from.getAllocatedBlocksTotal();
  pool.evicted_blocks_total = from.getEvictedBlocksTotal();
  pool.published_blocks_total = from.getPublishedBlocksTotal();
  pool.lookup_tokens_total = from.getLookupTokensTotal();
  pool.lookup_hit_tokens_total = from.getLookupHitTokensTotal();
  pool.appended_tokens_total = from.getAppendedTokensTotal();
  pool.attended_rows_total = from.getAttendedRowsTotal();
  return pool;
}

void write(wire::SessionInfo::Builder to, const SessionInfo& session) {
  to.setSession(session.session);
  to.setTenant(session.tenant);
  to.setRole(session.role);
  to.setClientName(session.client_name);
  to.setPid(session.pid);
  to.setUid(session.uid);
  to.setNumPools(session.num_pools);
  to.setOpenBlocks(session.open_blocks);
  to.setHolds(session.holds);
  to.setMapped(session.mapped);
  to.setConnectedUs(session.connected_us);
  to.setClosing(session.closing);
}

SessionInfo read_session_info(Reading& reading, wire::SessionInfo::Reader from) {
  reading.known_fields_only<wire::SessionInfo>("session", from);
  SessionInfo session;
  session.session = from.getSession();
  session.tenant = reading.text("tenant", from.getTenant());
  session.role = reading.text("role", from.getRole());
  session.client_name = reading.text("client_name", from.getClientName());
  session.pid = from.getPid();
  session.uid = from.getUid();
  session.num_pools = from.getNumPools();
  session.open_blocks = from.getOpenBlocks();
  session.holds = from.getHolds();
  session.mapped = from.getMapped();
  session.connected_us = from.getConnectedUs();
  session.closing = from.getClosing();
  return session;
}

void write(wire::DaemonStatus::Builder to, const DaemonStatus& status) {
  to.setVersion(status.version);
  to.setPid(status.pid);
  to.setUptimeUs(status.uptime_us);
  to.setMemoryBytes(status.memory_bytes);
  to.setPhysicalBytes(status.physical_bytes);
  to.setNumPools(status.num_pools);
  to.setNumSessions(status.num_sessions);
  to.setExecutorPid(status.executor_pid);
  to.setExecutorRestarts(status.executor_restarts);
  to.setKeeperPid(status.keeper_pid);
  to.setKeeperSegments(status.keeper_segments);
  to.setBackend(status.backend);
  to.setReady(status.ready);
}

DaemonStatus read_status(Reading& reading, wire::DaemonStatus::Reader from) {
  reading.known_fields_only<wire::DaemonStatus>("status", from);
  DaemonStatus status;
  status.version = reading.text("version", from.getVersion());
  status.pid = from.getPid();
  status.uptime_us = from.getUptimeUs();
  status.memory_bytes = from.getMemoryBytes();
  status.physical_bytes = from.getPhysicalBytes();
  status.num_pools = from.getNumPools();
  status.num_sessions = from.getNumSessions();
  status.executor_pid = from.getExecutorPid();
  status.executor_restarts = from.getExecutorRestarts();
  status.keeper_pid = from.getKeeperPid();
  status.keeper_segments = from.getKeeperSegments();
  status.backend = reading.text("backend", from.getBackend());
  status.ready = from.getReady();
  return status;
}

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
  }
  void operator()(const PoolOpened& body) {
    auto to = out.initPoolOpened();
    to.setPool(body.pool);
    to.setCreated(body.created);
    auto groups = to.initGroups(size32(body.groups.size()));
    for (uint32_t i = 0; i < body.groups.size(); ++i) write(groups[i], body.groups[i]);
  }
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
  Connected body{from.getVersion(), from.getSession(), {}, from.getArenaBytes()};
  const auto token = from.getSessionToken();
  if (token.size() != body.session_token.size()) {
    reading.refuse("session_token has " + std::to_string(token.size()) + " bytes, not 32");
    return body;
  }
  std::memcpy(body.session_token.data(), token.begin(), body.session_token.size());
  return body;
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
  }
  reading.refuse("reply kind " + std::to_string(static_cast<int>(reader.which())) + " is unknown");
  return Done{};
}

}  // namespace

size_t page_bytes(const PoolInfo& pool) {
  const auto words = [](const std::string& text) { return text.size() / sizeof(capnp::word) + 1; };
  const auto words_of = [](auto size) {
    return size.data / capnp::WORDS + size.pointers / capnp::POINTERS;
  };
  size_t sum = words_of(capnp::_::structSize<wire::PoolInfo>()) + words(pool.tenant) +
               words(pool.name) + words(pool.model) + 2;  // one word of header per list
  for (const auto& [name, value] : pool.identity)
    sum += words_of(capnp::_::structSize<wire::Pair>()) + words(name) + words(value);
  for (const GroupInfo& group : pool.groups)
    sum += words_of(capnp::_::structSize<wire::GroupInfo>()) + words(group.name);
  return sum * sizeof(capnp::word);
}

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
