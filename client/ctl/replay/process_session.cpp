#include "client/ctl/replay/process_session.h"

#include <csignal>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/ctl/replay/local_session.h"
#include "client/ctl/replay/parse.h"
#include "larder/system_error.h"

namespace larder::replay {
namespace {

constexpr auto kStepLimit = std::chrono::minutes(20);  // of one step in a child
constexpr auto kEndLimit = std::chrono::seconds(10);
constexpr uint64_t kMaxMessageBytes = uint64_t{4} << 30;

// False when the other side is gone.
bool send_all(int socket, const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = ::send(socket, bytes, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    bytes += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int socket, void* data, size_t size) {
  auto* bytes = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t received = ::recv(socket, bytes, size, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return false;
    bytes += received;
    size -= static_cast<size_t>(received);
  }
  return true;
}

bool send_message(int socket, const json& message) {
  const std::vector<uint8_t> bytes = json::to_cbor(message);
  const uint64_t size = bytes.size();
  return send_all(socket, &size, sizeof size) && send_all(socket, bytes.data(), bytes.size());
}

std::optional<json> receive_message(int socket) {
  uint64_t size = 0;
  if (!receive_all(socket, &size, sizeof size) || size > kMaxMessageBytes) return std::nullopt;
  std::vector<uint8_t> bytes(size);
  if (!receive_all(socket, bytes.data(), bytes.size())) return std::nullopt;
  return json::from_cbor(bytes);
}

json pack(const Outcome& outcome) {
  return {{"code", static_cast<int>(outcome.status.code())},
          {"message", outcome.status.message()},
          {"value", pack(outcome.value)}};
}

Outcome unpack_outcome(const json& message) {
  const auto code = static_cast<ErrorCode>(message.at("code").get<int>());
  if (code != ErrorCode::kOk) return refused(code, message.at("message").get<std::string>());
  return {{}, unpack(message.at("value"))};
}

json pack(const SessionSettings& settings) {
  return {{"socket", settings.socket_path}, {"tenant", settings.tenant},
          {"token", settings.token},        {"deadline_ms", settings.deadline.count()},
          {"device", settings.device},      {"is_embedded", settings.is_embedded},
          {"folder", settings.folder}};
}

SessionSettings unpack_settings(const json& message) {
  SessionSettings settings;
  settings.socket_path = message.at("socket").get<std::string>();
  settings.tenant = message.at("tenant").get<std::string>();
  settings.token = message.at("token").get<std::string>();
  settings.deadline = std::chrono::milliseconds(message.at("deadline_ms").get<int64_t>());
  settings.execution = Execution::kInProcess;
  settings.device = message.at("device").get<std::string>();
  settings.is_embedded = message.at("is_embedded").get<bool>();
  settings.folder = message.at("folder").get<std::string>();
  return settings;
}

json pack(const Step& step, const Context& context) {
  json results = json::object();
  for (const std::string& name : step.references) {
    if (results.contains(name)) continue;  // a step may mention a large result many times
    if (const auto found = context.results.find(name); found != context.results.end())
      results[name] = pack(found->second);
  }
  json generations = json::array();
  for (const auto& [block, generation] : context.generations)
    generations.push_back({block.first, block.second, generation});
  return {{"step", step.source},
          {"number", step.number},
          {"results", std::move(results)},
          {"generations", std::move(generations)}};
}

Outcome run_message(const json& message, const std::string& folder, LocalSession& session) {
  Problem problem;
  const Step step =
      parse_step(message.at("step"), message.at("number").get<size_t>(), folder, nullptr, problem);
  if (problem.found()) return refused(ErrorCode::kInternal, problem.text());
  Results results;
  for (const auto& [name, value] : message.at("results").items()) results[name] = unpack(value);
  Generations generations;
  for (const json& entry : message.at("generations"))
    generations[{entry.at(0).get<std::string>(), entry.at(1).get<int32_t>()}] =
        entry.at(2).get<uint32_t>();
  return session.run(step, {results, generations});
}

}  // namespace

// ------------------------------------------------------------------------------------- the parent

Result<std::unique_ptr<ProcessSession>> ProcessSession::start(const SessionSettings& settings) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
    throw SystemError("socketpair");
  OwnFd ours(sockets[0]);
  OwnFd theirs(sockets[1]);
  // This very program, whatever it is called and even if its file has been replaced.
  ChildProcess child({"/proc/self/exe", kSessionCommand}, "", theirs.get());
  theirs.reset();
  std::unique_ptr<ProcessSession> session(new ProcessSession(std::move(child), std::move(ours)));
  const Outcome outcome = session->exchange(pack(settings));
  if (!outcome.status.ok()) return outcome.status;
  return session;
}

Outcome ProcessSession::exchange(const json& message) {
  std::optional<json> answer;
  bool is_late = false;
  if (send_message(socket_.get(), message)) {
    pollfd entry{socket_.get(), POLLIN, 0};
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(kStepLimit);
    is_late = ::poll(&entry, 1, static_cast<int>(limit.count())) == 0;
    if (!is_late) answer = receive_message(socket_.get());
  }
  if (answer) return unpack_outcome(*answer);
  if (is_late) {
    kill();
    return refused(ErrorCode::kDeadlineExceeded, "the session's process did not answer in time");
  }
  const auto exit = child_.wait_exit(std::chrono::seconds(1));
  return refused(ErrorCode::kUnavailable,
                 "the session's process is gone" +
                     (exit ? ", with status " + std::to_string(*exit) : std::string()));
}

Outcome ProcessSession::run(const Step& step, const Context& context) {
  return exchange(pack(step, context));
}

void ProcessSession::kill() {
  child_.signal(SIGKILL);
  (void)child_.wait_exit(kEndLimit);
}

ProcessSession::~ProcessSession() {
  socket_.reset();
  (void)child_.wait_exit(kEndLimit);
}

// -------------------------------------------------------------------------------------- the child

int serve_session(OwnFd socket) {
  // The parent alone decides about Ctrl-C.
  ::signal(SIGINT, SIG_IGN);
  const auto hello = receive_message(socket.get());
  if (!hello) return 1;
  const SessionSettings settings = unpack_settings(*hello);
  auto session = LocalSession::open(settings);
  const Outcome opened = session ? Outcome() : Outcome{session.status(), {}};
  if (!send_message(socket.get(), pack(opened)) || !session) return 1;
  while (const auto message = receive_message(socket.get()))
    if (!send_message(socket.get(), pack(run_message(*message, settings.folder, **session))))
      return 1;
  return 0;
}

}  // namespace larder::replay
