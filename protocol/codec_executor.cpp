// Codec of what larderd and its executor say to each other.
#include "protocol/codec.h"
#include "protocol/executor_messages.h"

namespace larder::protocol {
namespace {

uint32_t size32(size_t size) {
  return static_cast<uint32_t>(size);
}

struct CommandWriter {
  wire::ExecutorCommand::Builder out;

  void operator()(const AddGroup& body) {
    auto to = out.initAddGroup();
    to.setPool(body.pool);
    to.setGroup(body.group);
    write(to.initSpec(), body.spec);
    write(to.initLayout(), body.layout);
  }
  void operator()(const AddSegments& body) {
    auto to = out.initAddSegments();
    to.setPool(body.pool);
    to.setGroup(body.group);
    write_numbers(to.initSizeBytes(size32(body.size_bytes.size())), body.size_bytes);
  }
  void operator()(const DropPool& body) { out.setDropPool(body.pool); }
  void operator()(const AddSession& body) {
    auto to = out.initAddSession();
    to.setSession(body.session);
    to.setArenaBytes(body.arena_bytes);
  }
  void operator()(const AttachPool& body) {
    auto to = out.initAttachPool();
    to.setSession(body.session);
    to.setPool(body.pool);
  }
  void operator()(const DetachPool& body) {
    auto to = out.initDetachPool();
    to.setSession(body.session);
    to.setPool(body.pool);
  }
  void operator()(const DropSession& body) { out.setDropSession(body.session); }
  void operator()(const Drain& body) {
    auto to = out.initDrain();
    to.setSession(body.session);
    to.setTicket(body.ticket);
  }
  void operator()(const CopyBlocks& body) {
    auto to = out.initCopy();
    to.setCopy(body.copy);
    to.setPool(body.pool);
    to.setGroup(body.group);
    write_numbers(to.initFrom(size32(body.from.size())), body.from);
    write_numbers(to.initTo(size32(body.to.size())), body.to);
  }
};

struct ReportWriter {
  wire::ExecutorReport::Builder out;

  void operator()(const Ready&) { out.setReady(); }
  void operator()(const Drained& body) { out.setDrained(body.ticket); }
  void operator()(const Copied& body) {
    auto to = out.initCopied();
    to.setCopy(body.copy);
    write(to.initError(), body.status);
  }
  void operator()(const Counters& body) {
    auto rows = out.initCounters(size32(body.pools.size()));
    for (uint32_t i = 0; i < body.pools.size(); ++i) {
      rows[i].setPool(body.pools[i].pool);
      rows[i].setAppendedTokens(body.pools[i].appended_tokens);
      rows[i].setAttendedRows(body.pools[i].attended_rows);
      rows[i].setRefusals(body.pools[i].refusals);
    }
  }
  void operator()(const BrokenRing& body) {
    auto to = out.initBrokenRing();
    to.setSession(body.session);
    to.setMessage(body.message.substr(0, kMaxErrorBytes));
  }
};

ExecutorCommand read_command(Reading& reading, wire::ExecutorCommand::Reader reader) {
  switch (reader.which()) {
    case wire::ExecutorCommand::ADD_GROUP: {
      const auto from = reader.getAddGroup();
      return AddGroup{from.getPool(), from.getGroup(), read_group_spec(reading, from.getSpec()),
                      read_group_layout(reading, from.getLayout())};
    }
    case wire::ExecutorCommand::ADD_SEGMENTS: {
      const auto from = reader.getAddSegments();
      return AddSegments{from.getPool(), from.getGroup(),
                         reading.numbers("sizeBytes", from.getSizeBytes(), kMaxFdsPerMessage)};
    }
    case wire::ExecutorCommand::DROP_POOL:
      return DropPool{reader.getDropPool()};
    case wire::ExecutorCommand::ADD_SESSION:
      return AddSession{reader.getAddSession().getSession(),
                        reader.getAddSession().getArenaBytes()};
    case wire::ExecutorCommand::ATTACH_POOL:
      return AttachPool{reader.getAttachPool().getSession(), reader.getAttachPool().getPool()};
    case wire::ExecutorCommand::DETACH_POOL:
      return DetachPool{reader.getDetachPool().getSession(), reader.getDetachPool().getPool()};
    case wire::ExecutorCommand::DROP_SESSION:
      return DropSession{reader.getDropSession()};
    case wire::ExecutorCommand::DRAIN:
      return Drain{reader.getDrain().getSession(), reader.getDrain().getTicket()};
    case wire::ExecutorCommand::COPY: {
      const auto from = reader.getCopy();
      return CopyBlocks{from.getCopy(), from.getPool(), from.getGroup(),
                        reading.numbers("from", from.getFrom(), kMaxBlocksPerCopy),
                        reading.numbers("to", from.getTo(), kMaxBlocksPerCopy)};
    }
  }
  reading.refuse("command kind " + std::to_string(static_cast<int>(reader.which())) +
                 " is unknown");
  return Drain{};
}

Counters read_counters(Reading& reading, capnp::List<wire::PoolCounters>::Reader from) {
  Counters counters;
  counters.pools.resize(reading.count("counters", from.size(), kMaxPools));
  for (uint32_t i = 0; i < counters.pools.size(); ++i)
    counters.pools[i] = {from[i].getPool(), from[i].getAppendedTokens(), from[i].getAttendedRows(),
                         from[i].getRefusals()};
  return counters;
}

ExecutorReport read_report(Reading& reading, wire::ExecutorReport::Reader reader) {
  switch (reader.which()) {
    case wire::ExecutorReport::READY:
      return Ready{};
    case wire::ExecutorReport::DRAINED:
      return Drained{reader.getDrained()};
    case wire::ExecutorReport::COPIED:
      return Copied{reader.getCopied().getCopy(),
                    read_error(reading, reader.getCopied().getError())};
    case wire::ExecutorReport::COUNTERS:
      return read_counters(reading, reader.getCounters());
    case wire::ExecutorReport::BROKEN_RING:
      return BrokenRing{
          reader.getBrokenRing().getSession(),
          reading.text("message", reader.getBrokenRing().getMessage(), kMaxErrorBytes)};
  }
  reading.refuse("report kind " + std::to_string(static_cast<int>(reader.which())) + " is unknown");
  return Ready{};
}

}  // namespace

Bytes encode(const ExecutorCommand& command) {
  capnp::MallocMessageBuilder builder;
  std::visit(CommandWriter{builder.initRoot<wire::ExecutorCommand>()}, command);
  return finish(builder);
}

Bytes encode(const ExecutorReport& report) {
  capnp::MallocMessageBuilder builder;
  std::visit(ReportWriter{builder.initRoot<wire::ExecutorReport>()}, report);
  return finish(builder);
}

Result<ExecutorCommand> decode_command(std::span<const std::byte> bytes) {
  ExecutorCommand command;
  const Status status = read_message(bytes, [&](capnp::MessageReader& message) {
    Reading reading;
    command = read_command(reading, message.getRoot<wire::ExecutorCommand>());
    return reading.status();
  });
  if (!status.ok()) return status;
  return command;
}

Result<ExecutorReport> decode_report(std::span<const std::byte> bytes) {
  ExecutorReport report;
  const Status status = read_message(bytes, [&](capnp::MessageReader& message) {
    Reading reading;
    report = read_report(reading, message.getRoot<wire::ExecutorReport>());
    return reading.status();
  });
  if (!status.ok()) return status;
  return report;
}

}  // namespace larder::protocol
