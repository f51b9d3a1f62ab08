// Codec of requests.
#include "protocol/codec.h"

namespace larder::protocol {
namespace {

void write(wire::TokenList::Builder builder, const TokenList& tokens) {
  write_list(builder, tokens);
}

TokenList read_tokens(Reading& reading, wire::TokenList::Reader reader) {
  return read_list<wire::TokenList, int32_t>(reading, "tokens", reader, kMaxTokensInline,
                                             kMaxTokensInArena);
}

void write_extra(capnp::List<capnp::Data>::Builder builder, const std::vector<std::string>& extra) {
  for (uint32_t i = 0; i < extra.size(); ++i)
    builder.set(i,
                kj::arrayPtr(reinterpret_cast<const kj::byte*>(extra[i].data()), extra[i].size()));
}

std::vector<std::string> read_extra(Reading& reading, capnp::List<capnp::Data>::Reader reader) {
  std::vector<std::string> extra(reading.count("extra", reader.size(), kMaxBlocksPerMessage));
  for (uint32_t i = 0; i < extra.size(); ++i)
    extra[i] = reading.data("extra", reader[i], kMaxExtraBytesPerBlock);
  return extra;
}

// A token list of one-token blocks is the longest there is.
int64_t read_first_block(Reading& reading, int64_t value) {
  return reading.number("first_block", value, 0, kMaxTokensInArena);
}

struct Writer {
  wire::Request::Builder out;

  void operator()(const Connect& body) {
    auto to = out.initConnect();
    to.setMinVersion(body.min_version);
    to.setMaxVersion(body.max_version);
    to.setTenant(body.tenant);
    to.setToken(body.token);
    to.setRole(body.role);
    to.setClientName(body.client_name);
    to.setArenaBytes(body.arena_bytes);
    to.setNotices(body.notices);
  }
  void operator()(const Goodbye&) { out.setGoodbye(); }
  void operator()(const OpenPool& body) { write(out.initOpenPool(), body.spec); }
  void operator()(const ClosePool& body) { out.setClosePool(body.pool); }
  void operator()(const DestroyPool& body) { out.setDestroyPool(body.pool); }
  void operator()(const OpenSegments& body) {
    auto to = out.initOpenSegments();
    to.setPool(body.pool);
    to.setGroup(body.group);
    to.setFirst(body.first);
    to.setCount(body.count);
  }
  void operator()(const Allocate& body) {
    auto to = out.initAllocate();
    to.setPool(body.pool);
    to.setGroup(body.group);
    to.setNumBlocks(body.num_blocks);
    to.setTotalBlocks(body.total_blocks);
  }
  void operator()(const Release& body) {
    auto to = out.initRelease();
    to.setPool(body.pool);
    to.setGroup(body.group);
    write(to.initBlocks(static_cast<uint32_t>(body.blocks.size())), body.blocks);
  }
  void operator()(const Publish& body) {
    auto to = out.initPublish();
    to.setPool(body.pool);
    to.setAdapter(body.adapter);
    write(to.initTokens(), body.tokens);
    write(to.initBlocks(static_cast<uint32_t>(body.blocks.size())), body.blocks);
    write_extra(to.initExtra(static_cast<uint32_t>(body.extra.size())), body.extra);
    to.setFirstBlock(body.first_block);
  }
  void operator()(const Lookup& body) {
    auto to = out.initLookup();
    to.setPool(body.pool);
    to.setAdapter(body.adapter);
    write(to.initTokens(), body.tokens);
    write_extra(to.initExtra(static_cast<uint32_t>(body.extra.size())), body.extra);
    to.setHold(body.hold);
    to.setFirstBlock(body.first_block);
  }
  void operator()(const Copy& body) {
    auto to = out.initCopy();
    to.setPool(body.pool);
    to.setGroup(body.group);
    write(to.initFrom(static_cast<uint32_t>(body.from.size())), body.from);
    write(to.initTo(static_cast<uint32_t>(body.to.size())), body.to);
  }
  void operator()(const ListPools& body) { out.setListPools(body.after); }
  void operator()(const ListSessions& body) { out.setListSessions(body.after); }
  void operator()(const GetStatus&) { out.setStatus(); }
  void operator()(const GetCapabilities&) { out.setCapabilities(); }
  void operator()(const Resume& body) {
    auto to = out.initResume();
    to.setSessionToken(kj::arrayPtr(body.session_token.data(), body.session_token.size()));
    to.setMinVersion(body.min_version);
    to.setMaxVersion(body.max_version);
    to.setCacheId(body.cache_id);
    to.setNotices(body.notices);
  }
  void operator()(const ResizePool& body) {
    auto to = out.initResizePool();
    to.setPool(body.pool);
    to.setGroup(body.group);
    to.setNumBlocks(body.num_blocks);
  }
  void operator()(const Evict& body) {
    auto to = out.initEvict();
    to.setPool(body.pool);
    to.setNumBlocks(body.num_blocks);
  }
  void operator()(const SetQuota& body) {
    auto to = out.initSetQuota();
    to.setTenant(body.tenant);
    to.setGuaranteedBytes(body.guaranteed_bytes);
    to.setMaximumBytes(body.maximum_bytes);
  }
  void operator()(const ListTenants&) { out.setListTenants(); }
  void operator()(const RegisterImport& body) { write(out.initRegisterImport(), body); }
  void operator()(const DropImport& body) { out.setDropImport(body.import_id); }
};

Connect read_connect(Reading& reading, wire::Connect::Reader reader) {
  reading.known_fields_only<wire::Connect>("connect", reader);
  Connect body;
  body.min_version = reader.getMinVersion();
  body.max_version = reader.getMaxVersion();
  body.tenant = reading.text("tenant", reader.getTenant());
  body.token = reading.text("token", reader.getToken());
  body.role = reading.text("role", reader.getRole());
  body.client_name = reading.text("client_name", reader.getClientName());
  body.arena_bytes = reading.arena_bytes(reader.getArenaBytes());
  body.notices = reader.getNotices();
  return body;
}

Resume read_resume(Reading& reading, wire::Resume::Reader reader) {
  reading.known_fields_only<wire::Resume>("resume", reader);
  return {reading.session_token(reader.getSessionToken()), reader.getMinVersion(),
          reader.getMaxVersion(), reader.getCacheId(), reader.getNotices()};
}

ResizePool read_resize(Reading& reading, wire::ResizePool::Reader reader) {
  reading.known_fields_only<wire::ResizePool>("resize_pool", reader);
  return {reader.getPool(), reader.getGroup(),
          reading.number("num_blocks", reader.getNumBlocks(), 0, INT64_MAX)};
}

Evict read_evict(Reading& reading, wire::Evict::Reader reader) {
  reading.known_fields_only<wire::Evict>("evict", reader);
  return {reader.getPool(), reading.number("num_blocks", reader.getNumBlocks(), 0, INT64_MAX)};
}

SetQuota read_set_quota(Reading& reading, wire::SetQuota::Reader reader) {
  reading.known_fields_only<wire::SetQuota>("set_quota", reader);
  return {reading.text("tenant", reader.getTenant()),
          reading.number("guaranteed_bytes", reader.getGuaranteedBytes(), 0, INT64_MAX),
          reading.number("maximum_bytes", reader.getMaximumBytes(), 0, INT64_MAX)};
}

Publish read_publish(Reading& reading, wire::Publish::Reader reader) {
  reading.known_fields_only<wire::Publish>("publish", reader);
  Publish body;
  body.pool = reader.getPool();
  body.adapter = reading.text("adapter", reader.getAdapter());
  body.tokens = read_tokens(reading, reader.getTokens());
  body.blocks = read_blocks(reading, "blocks", reader.getBlocks(), kMaxBlocksPerPublish);
  body.extra = read_extra(reading, reader.getExtra());
  body.first_block = read_first_block(reading, reader.getFirstBlock());
  return body;
}

Lookup read_lookup(Reading& reading, wire::Lookup::Reader reader) {
  reading.known_fields_only<wire::Lookup>("lookup", reader);
  Lookup body;
  body.pool = reader.getPool();
  body.adapter = reading.text("adapter", reader.getAdapter());
  body.tokens = read_tokens(reading, reader.getTokens());
  body.extra = read_extra(reading, reader.getExtra());
  body.hold = reader.getHold();
  body.first_block = read_first_block(reading, reader.getFirstBlock());
  return body;
}

Copy read_copy(Reading& reading, wire::Copy::Reader reader) {
  reading.known_fields_only<wire::Copy>("copy", reader);
  Copy body{reader.getPool(), reader.getGroup(), {}, {}};
  body.from = read_blocks(reading, "from", reader.getFrom(), kMaxBlocksPerCopy);
  body.to = read_blocks(reading, "to", reader.getTo(), kMaxBlocksPerCopy);
  reading.same_size("from", body.from.size(), "to", body.to.size());
  return body;
}

RequestBody read_body(Reading& reading, wire::Request::Reader reader) {
  switch (reader.which()) {
    case wire::Request::CONNECT:
      return read_connect(reading, reader.getConnect());
    case wire::Request::GOODBYE:
      return Goodbye{};
    case wire::Request::OPEN_POOL:
      return OpenPool{read_pool_spec(reading, reader.getOpenPool())};
    case wire::Request::CLOSE_POOL:
      return ClosePool{reader.getClosePool()};
    case wire::Request::DESTROY_POOL:
      return DestroyPool{reader.getDestroyPool()};
    case wire::Request::OPEN_SEGMENTS: {
      const auto body = reader.getOpenSegments();
      reading.known_fields_only<wire::OpenSegments>("open_segments", body);
      const int64_t count = reading.number("count", body.getCount(), 0, kMaxFdsPerMessage);
      return OpenSegments{body.getPool(), body.getGroup(), body.getFirst(),
                          static_cast<uint32_t>(count)};
    }
    case wire::Request::ALLOCATE: {
      const auto body = reader.getAllocate();
      reading.known_fields_only<wire::Allocate>("allocate", body);
      return Allocate{body.getPool(), body.getGroup(),
                      reading.number("num_blocks", body.getNumBlocks(), 0, kMaxBlocksPerMessage),
                      reading.number("total_blocks", body.getTotalBlocks(), 0, INT64_MAX)};
    }
    case wire::Request::RELEASE: {
      const auto body = reader.getRelease();
      reading.known_fields_only<wire::BlockList>("release", body);
      return Release{body.getPool(), body.getGroup(),
                     read_blocks(reading, "blocks", body.getBlocks(), kMaxBlocksPerMessage)};
    }
    case wire::Request::PUBLISH:
      return read_publish(reading, reader.getPublish());
    case wire::Request::LOOKUP:
      return read_lookup(reading, reader.getLookup());
    case wire::Request::COPY:
      return read_copy(reading, reader.getCopy());
    case wire::Request::LIST_POOLS:
      return ListPools{reader.getListPools()};
    case wire::Request::LIST_SESSIONS:
      return ListSessions{reader.getListSessions()};
    case wire::Request::STATUS:
      return GetStatus{};
    case wire::Request::CAPABILITIES:
      return GetCapabilities{};
    case wire::Request::RESUME:
      return read_resume(reading, reader.getResume());
    case wire::Request::RESIZE_POOL:
      return read_resize(reading, reader.getResizePool());
    case wire::Request::EVICT:
      return read_evict(reading, reader.getEvict());
    case wire::Request::SET_QUOTA:
      return read_set_quota(reading, reader.getSetQuota());
    case wire::Request::LIST_TENANTS:
      return ListTenants{};
    case wire::Request::REGISTER_IMPORT:
      return read_register_import(reading, reader.getRegisterImport());
    case wire::Request::DROP_IMPORT:
      return DropImport{reader.getDropImport()};
  }
  reading.refuse("request kind " + std::to_string(static_cast<int>(reader.which())) +
                 " is unknown to version " + std::to_string(kMaxVersion));
  return Goodbye{};
}

}  // namespace

Bytes encode(const Request& request) {
  capnp::MallocMessageBuilder builder;
  auto out = builder.initRoot<wire::Request>();
  out.setId(request.id);
  out.setDeadlineUs(request.deadline_us);
  out.setAnsweredBelow(request.answered_below);
  std::visit(Writer{out}, request.body);
  return finish(builder);
}

DecodedRequest decode_request(std::span<const std::byte> bytes) {
  Request request;
  const Status status = read_message(bytes, [&](capnp::MessageReader& message) {
    const auto reader = message.getRoot<wire::Request>();
    Reading reading;
    request.id = reader.getId();
    request.deadline_us = reader.getDeadlineUs();
    request.answered_below = reader.getAnsweredBelow();
    reading.known_fields_only<wire::Request>("request", reader);
    if (request.deadline_us > kMaxDeadlineUs)
      reading.refuse("deadline_us is " + std::to_string(request.deadline_us) + ", at most " +
                     std::to_string(kMaxDeadlineUs) + " is allowed");
    if (request.answered_below > request.id)
      reading.refuse("answered_below is " + std::to_string(request.answered_below) +
                     ", at most the request's id " + std::to_string(request.id) + " is allowed");
    request.body = read_body(reading, reader);
    return reading.status();
  });
  const uint64_t id = request.id;
  if (!status.ok()) return {id, status};
  return {id, std::move(request)};
}

}  // namespace larder::protocol
