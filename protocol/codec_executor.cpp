// Codec of what larderd and its executor say to each other.
#include "protocol/codec.h"
#include "protocol/executor.capnp.h"
#include "protocol/executor_messages.h"
#include "protocol/text.h"

namespace larder::protocol {
namespace {

uint32_t size32(size_t size) { return static_cast<uint32_t>(size); }

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
    to.setFirstIndex(body.first_index);
  }
  void operator()(const DropExtent& body) {
    auto to = out.initDropExtent();
    to.setPool(body.pool);
    to.setGroup(body.group);
    to.setIndex(body.index);
  }
  void operator()(const DropPool& body) { out.setDropPool(body.pool); }
  void operator()(const AddSession& body) {
    auto to = out.initAddSession();
    to.setSession(body.session);
    to.setArenaBytes(body.arena_bytes);
    write_numbers(to.initPools(size32(body.pools.size())), body.pools);
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
  void operator()(const AddImport& body) {
    auto to = out.initAddImport();
    to.setSession(body.session);
    to.setImport(body.import_id);
    write(to.initMemory(), body.memory);
  }
  void operator()(const RemoveImport& body) {
    auto to = out.initDropImport();
    to.setSession(body.session);
    to.setImport(body.import_id);
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
  void operator()(const BrokenRing& body) {
    auto to = out.initBrokenRing();
    to.setSession(body.session);
    to.setMessage(printable(body.message, kMaxErrorBytes));
  }
  void operator()(const ImportDone& body) {
    auto to = out.initImported();
    to.setSession(body.session);
    to.setImport(body.import_id);
    write(to.initError(), body.status);
  }
};

ExecutorCommand read_command(Reading& reading, wire::ExecutorCommand::Reader reader) {
  switch (reader.which()) {
    case wire::ExecutorCommand::ADD_GROUP: {
      const auto from = reader.getAddGroup();
      reading.known_fields_only<wire::AddGroup>("add_group", from);
      return AddGroup{from.getPool(), from.getGroup(), read_group_spec(reading, from.getSpec()),
                      read_group_layout(reading, from.getLayout())};
    }
    case wire::ExecutorCommand::ADD_SEGMENTS: {
      const auto from = reader.getAddSegments();
      reading.known_fields_only<wire::AddSegments>("add_segments", from);
      return AddSegments{from.getPool(), from.getGroup(),
                         reading.numbers("size_bytes", from.getSizeBytes(), kMaxFdsPerMessage),
                         from.getFirstIndex()};
    }
    case wire::ExecutorCommand::DROP_EXTENT: {
      const auto from = reader.getDropExtent();
      reading.known_fields_only<wire::DropExtent>("drop_extent", from);
      return DropExtent{from.getPool(), from.getGroup(), from.getIndex()};
    }
    case wire::ExecutorCommand::DROP_POOL:
      return DropPool{reader.getDropPool()};
    case wire::ExecutorCommand::ADD_SESSION: {
      const auto from = reader.getAddSession();
      reading.known_fields_only<wire::AddSession>("add_session", from);
      return AddSession{from.getSession(), reading.arena_bytes(from.getArenaBytes()),
                        reading.numbers("pools", from.getPools(), kMaxPools)};
    }
    case wire::ExecutorCommand::ATTACH_POOL: {
      const auto from = reader.getAttachPool();
      reading.known_fields_only<wire::SessionPool>("attach_pool", from);
      return AttachPool{from.getSession(), from.getPool()};
    }
    case wire::ExecutorCommand::DETACH_POOL: {
      const auto from = reader.getDetachPool();
      reading.known_fields_only<wire::SessionPool>("detach_pool", from);
      return DetachPool{from.getSession(), from.getPool()};
    }
    case wire::ExecutorCommand::DROP_SESSION:
      return DropSession{reader.getDropSession()};
    case wire::ExecutorCommand::DRAIN: {
      const auto from = reader.getDrain();
      reading.known_fields_only<wire::Drain>("drain", from);
      return Drain{from.getSession(), from.getTicket()};
    }
    case wire::ExecutorCommand::COPY: {
      const auto from = reader.getCopy();
      reading.known_fields_only<wire::CopyBlocks>("copy", from);
      CopyBlocks body{from.getCopy(), from.getPool(), from.getGroup(), {}, {}};
      body.from = reading.numbers("from", from.getFrom(), kMaxBlocksPerCopy);
      body.to = reading.numbers("to", from.getTo(), kMaxBlocksPerCopy);
      reading.same_size("from", body.from.size(), "to", body.to.size());
      return body;
    }
    case wire::ExecutorCommand::ADD_IMPORT: {
      const auto from = reader.getAddImport();
      reading.known_fields_only<wire::AddImport>("add_import", from);
      return AddImport{from.getSession(), from.getImport(),
                       read_register_import(reading, from.getMemory())};
    }
    case wire::ExecutorCommand::DROP_IMPORT: {
      const auto from = reader.getDropImport();
      reading.known_fields_only<wire::SessionImport>("drop_import", from);
      return RemoveImport{from.getSession(), from.getImport()};
    }
  }
  reading.refuse("command kind " + std::to_string(static_cast<int>(reader.which())) +
                 " is unknown");
  return Drain{};
}

ExecutorReport read_report(Reading& reading, wire::ExecutorReport::Reader reader) {
  switch (reader.which()) {
    case wire::ExecutorReport::READY:
      return Ready{};
    case wire::ExecutorReport::DRAINED:
      return Drained{reader.getDrained()};
    case wire::ExecutorReport::COPIED: {
      const auto from = reader.getCopied();
      reading.known_fields_only<wire::Copied>("copied", from);
      return Copied{from.getCopy(), read_error(reading, from.getError())};
    }
    case wire::ExecutorReport::BROKEN_RING: {
      const auto from = reader.getBrokenRing();
      reading.known_fields_only<wire::BrokenRing>("broken_ring", from);
      return BrokenRing{from.getSession(),
                        reading.text("message", from.getMessage(), kMaxErrorBytes)};
    }
    case wire::ExecutorReport::IMPORTED: {
      const auto from = reader.getImported();
      reading.known_fields_only<wire::Imported>("imported", from);
      return ImportDone{from.getSession(), from.getImport(), read_error(reading, from.getError())};
    }
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
    const auto reader = message.getRoot<wire::ExecutorCommand>();
    reading.known_fields_only<wire::ExecutorCommand>("command", reader);
    command = read_command(reading, reader);
    return reading.status();
  });
  if (!status.ok()) return status;
  return command;
}

Result<ExecutorReport> decode_report(std::span<const std::byte> bytes) {
  ExecutorReport report;
  const Status status = read_message(bytes, [&](capnp::MessageReader& message) {
    Reading reading;
    const auto reader = message.getRoot<wire::ExecutorReport>();
    reading.known_fields_only<wire::ExecutorReport>("report", reader);
    report = read_report(reading, reader);
    return reading.status();
  });
  if (!status.ok()) return status;
  return report;
}

}  // namespace larder::protocol
