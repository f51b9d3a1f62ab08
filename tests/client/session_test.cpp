// A session over several connections: a scripted larderd goes and comes back.
#include <filesystem>
#include <fstream>
#include <optional>
#include <unistd.h>

#include <doctest/doctest.h>

#include "allocator/host_memory.h"
#include "allocator/mapped_range.h"
#include "protocol/arena.h"
#include "tests/support/scripted_daemon.h"

namespace larder::test {
namespace {

PoolOptions opaque_pool() {
  PoolOptions options;
  options.name = "p";
  options.model = "m";
  options.opaque_block_bytes = 4096;
  options.geometry.block_tokens = 16;
  options.num_blocks = 4;
  return options;
}

Status refusal(ErrorCode code, const std::string& sentence) { return {code, sentence}; }

TEST_CASE("a client that makes no calls takes its session up again when larderd comes back") {
  ScriptedDaemon daemon;
  auto [client, first] = daemon.join();
  CHECK(client.session_id() == ScriptedDaemon::kSession);
  CHECK(client.cache_id() == ScriptedDaemon::kCache);
  CHECK(client.resumes() == 0);
  CHECK(client.longest_outage().count() == 0);
  const uint64_t boot_id = client.boot_id();
  std::optional<Peer> peer(std::move(first));
  for (uint64_t round = 1; round <= 3; ++round) {
    peer.reset();
    peer.emplace(daemon.accept_resume());
    CHECK(eventually([&, resumed = &client] { return resumed->resumes() == round; }));
    CHECK(client.boot_id() == boot_id + round);
  }
  CHECK(client.session_id() == ScriptedDaemon::kSession);
  CHECK(client.cache_id() == ScriptedDaemon::kCache);
  CHECK(client.longest_outage().count() > 0);
  ScriptedDaemon::end(std::move(client), *peer);
}

TEST_CASE("the end of the notice socket alone is a loss, too") {
  ScriptedDaemon daemon;
  auto [client, first] = daemon.join();
  first.close_notices();
  Peer peer = daemon.accept_resume();
  // For larderd the old connection has ended.
  ScriptedDaemon::end(std::move(client), peer);
}

TEST_CASE("a request whose answer was lost is sent again under its id") {
  ScriptedDaemon daemon;
  auto [client, first] = daemon.join();
  auto opening = beside([&, asking = &client] { return asking->open_pool(opaque_pool()); });
  std::optional<Peer> peer(std::move(first));
  const protocol::Request asked = peer->next();
  REQUIRE(std::holds_alternative<protocol::OpenPool>(asked.body));
  CHECK(asked.answered_below == asked.id);
  for (int round = 0; round < 2; ++round) {
    peer.reset();
    peer.emplace(daemon.accept_resume());
    const protocol::Request again = peer->next();
    CHECK(again.id == asked.id);
    CHECK(again.answered_below == asked.answered_below);
    CHECK(std::get<protocol::OpenPool>(again.body).spec.name == "p");
  }
  // larderd's own UNAVAILABLE is an answer and no loss: the connection stays.
  peer->reply(asked.id, refusal(ErrorCode::kUnavailable, "the keeper is gone"));
  check_status(opening.get().status(), ErrorCode::kUnavailable, "the keeper is gone");
  auto second = beside([&, asking = &client] { return asking->open_pool(opaque_pool()); });
  const protocol::Request next = peer->next();
  CHECK(next.id > asked.id);
  CHECK(next.answered_below == next.id);
  peer->reply(next.id, refusal(ErrorCode::kBusy, "later"));
  check_status(second.get().status(), ErrorCode::kBusy, "later");
  CHECK(client.resumes() == 2);
  ScriptedDaemon::end(std::move(client), *peer);
}

TEST_CASE("a larderd that is not there, is not ready or falls again is tried until it answers") {
  ScriptedDaemon daemon;
  auto [client, first] = daemon.join();
  {
    const Peer gone = std::move(first);
    daemon.stop_listening();
  }
  auto opening = beside([&, asking = &client] { return asking->open_pool(opaque_pool()); });
  daemon.listen();
  for (const ErrorCode code :
       {ErrorCode::kShuttingDown, ErrorCode::kResourceExhausted, ErrorCode::kBusy})
    daemon.accept().answer<protocol::Resume>(refusal(code, "not now"));
  daemon.accept();                                   // falls before it reads
  (void)daemon.accept().expect<protocol::Resume>();  // falls before it answers
  Peer peer = daemon.accept_resume();
  peer.answer<protocol::OpenPool>(refusal(ErrorCode::kPermissionDenied, "no"));
  check_status(opening.get().status(), ErrorCode::kPermissionDenied, "no");
  CHECK(client.resumes() == 1);
  ScriptedDaemon::end(std::move(client), peer);
}

TEST_CASE("a session that larderd does not know is over, and every call says so") {
  ScriptedDaemon daemon;
  auto [client, first] = daemon.join();
  { const Peer gone = std::move(first); }
  daemon.accept().answer<protocol::Resume>(
      refusal(ErrorCode::kStaleSession, "session 7 was away for 31 s"));
  for (int i = 0; i < 3; ++i)
    check_status(client.open_pool(opaque_pool()).status(), ErrorCode::kStaleSession,
                 "session 7 was away for 31 s");
  CHECK_FALSE(daemon.has_connection());
  CHECK(client.resumes() == 0);
}

TEST_CASE("a resume that is refused for another reason is UNAVAILABLE for good") {
  for (const auto code : {ErrorCode::kUnsupported, ErrorCode::kPermissionDenied}) {
    ScriptedDaemon daemon;
    auto [client, first] = daemon.join();
    { const Peer gone = std::move(first); }
    daemon.accept().answer<protocol::Resume>(refusal(code, "because"));
    const Status status = client.open_pool(opaque_pool()).status();
    check_status(status, ErrorCode::kUnavailable, "does not resume the session");
    check_status(status, ErrorCode::kUnavailable, std::string(error_code_name(code)));
    CHECK_FALSE(daemon.has_connection());
  }
}

TEST_CASE("an answer to resume that names another session is not taken") {
  ScriptedDaemon daemon;
  const auto refuses = [&](const protocol::ReplyBody& body) {
    auto [client, first] = daemon.join();
    { const Peer gone = std::move(first); }
    Peer peer = daemon.accept();
    peer.answer<protocol::Resume>(body);
    check_status(client.open_pool(opaque_pool()).status(), ErrorCode::kUnavailable,
                 "another session");
  };
  protocol::Connected other = daemon.connected(0);
  other.session = 8;
  refuses(other);
  other = daemon.connected(0);
  other.session_token[0] ^= 1;
  refuses(other);
  refuses(protocol::Done{});
}

TEST_CASE("a call that larderd does not come back for in time is UNAVAILABLE, with the reason") {
  ScriptedDaemon daemon;
  ClientOptions options = ScriptedDaemon::no_arena();
  options.deadline = std::chrono::milliseconds(200);
  auto [client, first] = daemon.join(options);
  { const Peer gone = std::move(first); }
  daemon.stop_listening();
  const Status status = client.open_pool(opaque_pool()).status();
  check_status(status, ErrorCode::kUnavailable, daemon.socket());
  check_status(status, ErrorCode::kUnavailable, "could not be resumed in time");
  // It goes on trying all the same.
  daemon.listen();
  Peer peer = daemon.accept_resume();
  ScriptedDaemon::end(std::move(client), peer);
}

TEST_CASE("a connect does not wait for a larderd that is not there") {
  ScriptedDaemon daemon;
  daemon.stop_listening();
  ClientOptions options = ScriptedDaemon::no_arena();
  options.deadline = std::chrono::hours(1);  // what a wait would take
  options.socket_path = daemon.socket();
  check_status(Client::connect(options).status(), ErrorCode::kUnavailable, "there is no socket");
}

TEST_CASE("a goodbye that larderd does not live to answer is not said again") {
  ScriptedDaemon daemon;
  auto [client, first] = daemon.join();
  auto ending =
      beside([ended = std::move(client)]() mutable { const Client last(std::move(ended)); });
  {
    Peer peer = std::move(first);
    (void)peer.expect<protocol::Goodbye>();
  }
  ending.get();
  CHECK_FALSE(daemon.has_connection());
}

TEST_CASE("a client ends while larderd is away, also in the midst of a resume") {
  ScriptedDaemon daemon;
  std::optional<Peer> silent;
  {
    auto [client, first] = daemon.join();
    { const Peer gone = std::move(first); }
    silent.emplace(daemon.accept());
    (void)silent->expect<protocol::Resume>();  // never answered
  }
  {
    auto [client, first] = daemon.join();
    { const Peer gone = std::move(first); }
    daemon.stop_listening();
  }
}

TEST_CASE("a larderd without a notice socket is served: the connection itself tells of its end") {
  ScriptedDaemon daemon;
  ClientOptions options = ScriptedDaemon::no_arena();
  options.socket_path = daemon.socket();
  auto connecting = beside([&] { return Client::connect(options); });
  std::optional<Peer> peer(daemon.accept());
  peer->answer<protocol::Connect>(daemon.connected(0));
  auto client = connecting.get();
  REQUIRE(client.ok());
  peer.reset();
  peer.emplace(daemon.accept_resume());
  ScriptedDaemon::end(std::move(*client), *peer);
}

TEST_CASE("the client's thread blocks every signal") {
  ScriptedDaemon daemon;
  auto [client, peer] = daemon.join();
  int others = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(::getpid())) continue;
    std::ifstream file(task.path() / "status");
    for (std::string line; std::getline(file, line);)
      if (line.rfind("SigBlk:", 0) == 0) {
        ++others;
        // All 64 but KILL (9) and STOP (19), and the two that glibc keeps for itself (32, 33).
        CHECK((std::stoull(line.substr(7), nullptr, 16) | 0x180000000ull | 0x40100ull) ==
              0xffffffffffffffffull);
      }
  }
  CHECK(others >= 1);
  ScriptedDaemon::end(std::move(client), peer);
}

// ------------------------------------------------------------------------------ calls on request

// The arena of a session, seen by its executors.
struct ScriptedArena {
  Segment segment = create_host_segment("arena", static_cast<int64_t>(protocol::kMinArenaBytes));
  SharedMapping mapping =
      SharedMapping::map(segment.fd.get(), static_cast<int64_t>(protocol::kMinArenaBytes), true);
  protocol::Arena arena{{mapping.data(), protocol::kMinArenaBytes}};
  OwnFd wake{::dup(segment.fd.get())};  // nobody sleeps: it is not written

  ScriptedArena() { arena.format(); }

  protocol::Submission next(protocol::ArenaServer& executor) {
    std::optional<protocol::Submission> submission;
    REQUIRE(eventually([&] {
      auto peeked = executor.peek();
      REQUIRE(peeked.ok());
      submission = *peeked;
      return submission.has_value();
    }));
    return *submission;
  }
};

struct OnRequest {
  ScriptedDaemon daemon;
  ScriptedArena arena;
  ScriptedDaemon::Joined joined;
  Pool pool;

  OnRequest() : joined(connect()), pool(open()) {}

  ScriptedDaemon::Joined connect() {
    ClientOptions options = ScriptedDaemon::no_arena();
    options.arena_bytes = static_cast<int64_t>(protocol::kMinArenaBytes);
    return daemon.join(options, {arena.segment.fd.get(), arena.wake.get()},
                       protocol::kMinArenaBytes);
  }
  Pool open() {
    PoolOptions options = opaque_pool();
    options.execution = Execution::kOnRequest;
    auto opening = beside([&] { return joined.client.open_pool(options); });
    protocol::GroupLayout layout{4096, 4096, 4096, 4, {4 * 4096}};
    joined.peer.answer<protocol::OpenPool>(protocol::PoolOpened{5, true, {layout}});
    auto opened = opening.get();
    REQUIRE_MESSAGE(opened.ok(), opened.status().to_string());
    return std::move(*opened);
  }
};

TEST_CASE("a call under way when larderd and executor die is answered by the next executor") {
  OnRequest f;
  const std::vector<int32_t> blocks = {0, 3};
  auto scrubbing = beside([&] { return f.pool.scrub(blocks); });
  {
    protocol::ArenaServer executor(f.arena.arena);
    CHECK(f.arena.next(executor).pool == 5);
  }
  { const Peer gone = std::move(f.joined.peer); }
  Peer peer = f.daemon.accept_resume();
  protocol::ArenaServer executor(f.arena.arena);
  const protocol::Submission again = f.arena.next(executor);
  CHECK(again.op == static_cast<uint32_t>(protocol::Op::kScrub));
  executor.complete(again, Status());
  const Status status = scrubbing.get();
  CHECK_MESSAGE(status.ok(), status.to_string());
  auto ending = beside([&] { const Pool pool = std::move(f.pool); });
  CHECK(peer.answer<protocol::ClosePool>(protocol::Done{}).pool == 5);
  ending.get();
  ScriptedDaemon::end(std::move(f.joined.client), peer);
}

TEST_CASE("when the session is over, the call that waits says so, and those after it") {
  OnRequest f;
  const std::vector<int32_t> blocks = {1};
  auto scrubbing = beside([&] { return f.pool.scrub(blocks); });
  protocol::ArenaServer executor(f.arena.arena);
  (void)f.arena.next(executor);
  { const Peer gone = std::move(f.joined.peer); }
  f.daemon.accept().answer<protocol::Resume>(refusal(ErrorCode::kStaleSession, "unknown"));
  check_status(scrubbing.get(), ErrorCode::kStaleSession, "unknown");
  std::vector<std::byte> bytes(4096);
  check_status(f.pool.scrub(blocks), ErrorCode::kStaleSession, "unknown");
  check_status(f.pool.read_pages(0, blocks, bytes), ErrorCode::kStaleSession, "unknown");
  check_status(f.pool.write_pages(0, blocks, bytes), ErrorCode::kStaleSession, "unknown");
  check_status(f.pool.checksum(blocks).status(), ErrorCode::kStaleSession, "unknown");
  check_status(f.pool.allocate(1).status(), ErrorCode::kStaleSession, "unknown");
  check_status(f.pool.append(0, {}, {}, {}), ErrorCode::kStaleSession, "unknown");
}

}  // namespace
}  // namespace larder::test
