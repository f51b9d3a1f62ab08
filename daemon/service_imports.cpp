// Memory of engines that their calls on request may name, and which executor serves which ring.
#include <spdlog/spdlog.h>

#include "daemon/service.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

Status check_import(const protocol::RegisterImport& memory, size_t num_fds, bool trusts_ipc) {
  const bool is_ipc = memory.kind == "cuda_ipc";
  if (!is_ipc && memory.kind != "memfd" && memory.kind != "vmm")
    return {ErrorCode::kUnsupported,
            "kind is \"" + memory.kind + "\"; served: memfd, vmm, cuda_ipc"};
  if (is_ipc && !trusts_ipc)
    return {ErrorCode::kPermissionDenied,
            "kind is cuda_ipc: its owner could free the memory under the executor, and "
            "trust_ipc_handles is false in larderd's configuration"};
  if (num_fds != (is_ipc ? 0u : 1u))
    return {ErrorCode::kInvalidArgument, "the request carries " + std::to_string(num_fds) +
                                             " fds, kind " + memory.kind + " needs " +
                                             (is_ipc ? "none" : "one")};
  if (memory.handle.size() != (is_ipc ? protocol::kIpcHandleBytes : 0u))
    return {ErrorCode::kInvalidArgument, "handle has " + std::to_string(memory.handle.size()) +
                                             " bytes, kind " + memory.kind + " has " +
                                             (is_ipc ? "64" : "none")};
  return {};
}

}  // namespace

// A session's first pool says where its calls will run. It had none, so nothing that it has queued
// can touch a block: what the old executor finds in the ring meanwhile it refuses.
void Service::move_ring(Session& session, const std::string& device) {
  if (session.ring_device == device) return;
  executor_of(session).send(protocol::DropSession{value(session.id)});
  session.ring_device = device;
  tell_executor_session(session);
}

// The context of an executor that has no pool any more holds memory that others may want.
void Service::retire_executor(const std::string& device) {
  if (device == kHostDevice || store_.uses(device)) return;
  for (const auto& [id, session] : sessions_)
    if (session->ring_device == device) move_ring(*session, kHostDevice);
  executors_.retire(device);
}

void Service::register_import(Session& session, uint64_t request,
                              const protocol::RegisterImport& body, std::vector<OwnFd> fds) {
  const auto refuse = [&](const Status& status) { reply(session, request, status); };
  if (Status status = check_import(body, fds.size(), config_.trust_ipc_handles); !status.ok())
    return refuse(status);
  if (!session.arena)
    return refuse(
        {ErrorCode::kInvalidArgument, "the session has no arena, so no calls on request"});
  if (session.imports.size() >= protocol::kMaxImportsPerSession)
    return refuse({ErrorCode::kResourceExhausted, "the session has " +
                                                      std::to_string(session.imports.size()) +
                                                      " imports, as many as are allowed"});
  // Never one of an earlier larderd, whose imports are gone: 32 bits travel in a record.
  if (next_import_ == 0) next_import_ = static_cast<uint32_t>(boot_id_ >> 8);
  const uint64_t id = static_cast<uint32_t>(next_import_++) | 1u << 31;
  Session::Import& import =
      session.imports
          .emplace(id, Session::Import{body, fds.empty() ? OwnFd() : std::move(fds[0]), request})
          .first->second;
  tell_executor_import(session, id, import);
}

void Service::tell_executor_import(const Session& session, uint64_t id,
                                   const Session::Import& import) {
  std::vector<OwnFd> fds;
  if (import.fd.valid()) fds.push_back(duplicate(import.fd.get()));
  executor_of(session).send(protocol::AddImport{value(session.id), id, import.memory},
                            std::move(fds));
}

// One that an executor cannot take, or a later executor not any more, is gone.
void Service::on_imported(const protocol::ImportDone& done) {
  Session* session = find(SessionId{done.session});
  if (session == nullptr) return;
  const auto import = session->imports.find(done.import_id);
  if (import == session->imports.end()) return;
  const uint64_t request = std::exchange(import->second.request, 0);
  if (!done.status.ok()) {
    spdlog::warn("event=import_refused session={} error=\"{}\"", done.session,
                 done.status.to_string());
    session->imports.erase(import);
  }
  if (request == 0) return;
  if (done.status.ok()) return reply(*session, request, protocol::Imported{done.import_id});
  reply(*session, request, done.status);
}

// After the calls that may name it: the executor's word is waited for.
void Service::drop_import(Session& session, uint64_t request, uint64_t import_id) {
  if (!session.imports.contains(import_id))
    return reply(session, request,
                 Status(ErrorCode::kNotFound,
                        "import " + std::to_string(import_id) + " is not one of this session"));
  executor_of(session).when_idle(value(session.id), [this, id = session.id, request, import_id] {
    Session* still_there = find(id);
    if (still_there == nullptr) return;
    if (still_there->imports.erase(import_id) > 0)
      executor_of(*still_there).send(protocol::RemoveImport{value(id), import_id});
    reply(*still_there, request, protocol::Done{});
  });
}

}  // namespace larder::daemon
