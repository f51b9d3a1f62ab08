// Sessions that do not come back after a restart, or come back as somebody else: what of theirs may
// be used again, and when.
#include <regex>
#include <sys/stat.h>

#include "client/control_connection.h"
#include "protocol/limits.h"
#include "tests/e2e/survival.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

constexpr const char* kShortGrace = "resume_grace_ms = 500\n";

// Opens `p`, allocates three blocks and says so; then answers every word with how an allocation of
// one block goes.
void hold_three(const Node& node, const Talk& talk, Execution execution) {
  Client client = must(Client::connect({.socket_path = node.socket(), .name = "holder"}));
  Pool pool = must(client.open_pool(small_pool("p", execution)));
  must(pool.allocate(3));
  talk.say("ready");
  while (talk.hear() != "end") {
    const auto one = pool.allocate(1);
    talk.say(one.ok() ? "OK" : one.status().to_string());
  }
}

void kill_larderd(Node& node) {
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(20s).has_value());
}

double fences_counted(const Node& node, const std::string& fence) {
  const std::string text = node.http("/metrics");
  const std::regex line("larder_fence_seconds_count\\{fence=\"" + fence + "\"\\} ([0-9.e+]+)");
  std::smatch match;
  REQUIRE(std::regex_search(text, match, line));
  return std::stod(match[1]);
}

TEST_CASE(
    "a client stopped past the grace period has lost its session, and its blocks wait for it") {
  const ConfigFile config(kShortGrace);
  Node node(config.options());
  Client watcher = node.connect();
  Pool pool = must(watcher.open_pool(small_pool("p", Execution::kOnRequest)));
  Child holder([&](const Talk& talk) { hold_three(node, talk, Execution::kInProcess); });
  REQUIRE(holder.hear() == "ready");
  holder.stop();
  node.replace_larderd(SIGKILL);
  CHECK(eventually([&] { return count_closing(node) == 1; }));
  const auto group = group_of(node, "p");
  CHECK(group["quarantined"] == 3);
  CHECK(group["quarantined_pidfd"] == 3);
  CHECK(group["free"] == 5);
  holder.signal(SIGCONT);
  holder.say("allocate");
  const std::string answer = holder.hear();
  INFO(answer);
  CHECK(answer.find("STALE_SESSION") == 0);
  CHECK(answer.find("500 ms") != std::string::npos);
  CHECK(group_of(node, "p")["free"] == 5);  // it lives, and has them mapped
  holder.say("end");
  CHECK(holder.wait() == 0);
  CHECK(eventually([&] { return group_of(node, "p")["free"] == 8; }));
  CHECK(fences_counted(node, "pidfd") == 1);
}

TEST_CASE("blocks of a client that died while larderd was down are free at once") {
  Node node;  // with 30 s of grace, which nobody waits for
  Client watcher = node.connect();
  Pool pool = must(watcher.open_pool(small_pool("p", Execution::kOnRequest)));
  for (const Execution execution : {Execution::kInProcess, Execution::kOnRequest}) {
    Child holder([&](const Talk& talk) { hold_three(node, talk, execution); });
    REQUIRE(holder.hear() == "ready");
    kill_larderd(node);
    holder.kill();
    node.start_larderd();
    node.await_ready();
    CHECK(eventually([&] { return group_of(node, "p")["free"] == 8; }));
    CHECK(sessions_of(node).size() == 1);
  }
}

TEST_CASE("a forked child that lives on keeps blocks quarantined, over restarts of both daemons") {
  Node node;
  Client watcher = node.connect();
  Pool pool = must(watcher.open_pool(small_pool("p", Execution::kOnRequest)));
  Child holder([&](const Talk& talk) {
    Client client = must(Client::connect({.socket_path = node.socket(), .name = "forker"}));
    Pool mine = must(client.open_pool(small_pool("p", Execution::kInProcess)));
    must(mine.allocate(3));
    const pid_t child = ::fork();
    if (child == 0)
      while (true) ::pause();
    talk.say(std::to_string(child));
    talk.hear();
  });
  const pid_t child = std::stoi(holder.hear());
  holder.kill();
  const auto is_quarantined = [&] {
    const auto group = group_of(node, "p");
    return group["quarantined_pidfd"] == 3 && group["free"] == 5;
  };
  CHECK(eventually(is_quarantined));
  const auto shown = sessions_of(node);
  const auto closing = std::find_if(shown.begin(), shown.end(), [](const auto& session) {
    return session["client_name"] == "forker";
  });
  REQUIRE(closing != shown.end());
  CHECK((*closing)["closing"] == true);
  CHECK((*closing)["fence"] == "pidfd");
  const Output text = run({program("larderctl"), "--socket", node.socket(), "sessions"});
  CHECK(std::regex_search(text.stdout_text, std::regex("forker .* closing +pidfd")));
  node.replace_larderd(SIGKILL);
  CHECK(eventually(is_quarantined));
  // A new keeper gets what tells that the child is gone, too.
  node.keeper().signal(SIGKILL);
  REQUIRE(node.keeper().wait_exit(20s).has_value());
  node.start_keeper();
  CHECK(eventually([&] { return node.http("/readyz").find("200 OK") != std::string::npos; }));
  node.replace_larderd(SIGKILL);
  CHECK(eventually(is_quarantined));
  CHECK(count_closing(node) == 1);
  ::kill(child, SIGKILL);
  CHECK(eventually([&] { return group_of(node, "p")["free"] == 8; }));
  CHECK(count_closing(node) == 0);
}

TEST_CASE("a forked child that is there when larderd comes back does not hide the parent's death") {
  Node node;
  Client watcher = node.connect();
  Pool pool = must(watcher.open_pool(small_pool("p", Execution::kOnRequest)));
  Child holder([&](const Talk& talk) {
    Client client = must(Client::connect({.socket_path = node.socket(), .name = "forker"}));
    Pool mine = must(client.open_pool(small_pool("p", Execution::kInProcess)));
    must(mine.allocate(3));
    const pid_t child = ::fork();
    if (child == 0)
      while (true) ::pause();
    talk.say(std::to_string(child));
    talk.hear();
  });
  const pid_t child = std::stoi(holder.hear());
  kill_larderd(node);
  holder.kill();
  node.start_larderd();
  node.await_ready();
  CHECK(eventually([&] { return group_of(node, "p")["quarantined_pidfd"] == 3; }));
  ::kill(child, SIGKILL);
  CHECK(eventually([&] { return group_of(node, "p")["free"] == 8; }));
}

TEST_CASE("a killed engine's blocks are free again, and the histogram of fences counts it") {
  Node node;
  Client watcher = node.connect();
  Pool pool = must(watcher.open_pool(small_pool("p", Execution::kOnRequest)));
  for (int round = 1; round <= 3; ++round) {
    Child holder([&](const Talk& talk) { hold_three(node, talk, Execution::kInProcess); });
    REQUIRE(holder.hear() == "ready");
    CHECK(group_of(node, "p")["free"] == 5);
    holder.kill();
    CHECK(eventually([&] { return group_of(node, "p")["free"] == 8; }));
    CHECK(fences_counted(node, "pidfd") == round);
  }
  CHECK(fences_counted(node, "unprovable") == 0);
}

// ------------------------------------------------------------------------------------------ resume

// What larderd says to a resume over a connection of its own.
Status resume(const Node& node, const protocol::Resume& body) {
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  auto connection = must(ControlConnection::open(node.socket(), deadline));
  protocol::Request request{0, 0, body};
  return connection.exchange(request, deadline).status();
}

protocol::Connect hello() {
  protocol::Connect body;
  body.tenant = "default";
  body.role = "append";
  body.client_name = "raw";
  return body;
}

TEST_CASE("a session is resumed by its own process with its own token, and by nobody else") {
  Node node;
  std::optional<ControlConnection> raw(
      must(ControlConnection::connect(node.socket(), hello(), 10s)));
  const protocol::Connected session = raw->session();
  const protocol::Resume good{session.session_token, protocol::kMinVersion, protocol::kMaxVersion,
                              session.cache_id, false};
  // It is connected: nobody may take it over.
  CHECK(resume(node, good).code() == ErrorCode::kStaleSession);
  kill_larderd(node);
  node.start_larderd();
  node.await_ready();
  protocol::Resume wrong_token = good;
  wrong_token.session_token[0] ^= 1;
  Status refused = resume(node, wrong_token);
  INFO(refused.to_string());
  CHECK(refused.code() == ErrorCode::kStaleSession);
  CHECK(refused.message().find("30000 ms") != std::string::npos);
  protocol::Resume other_cache = good;
  other_cache.cache_id ^= 2;
  CHECK(resume(node, other_cache).code() == ErrorCode::kStaleSession);
  protocol::Resume future = good;
  future.min_version = future.max_version = protocol::kMaxVersion + 1;
  CHECK(resume(node, future).code() == ErrorCode::kUnsupported);
  Child thief([&](const Talk& talk) { talk.say(resume(node, good).to_string()); });
  const std::string answer = thief.hear();
  CHECK(answer.find("PERMISSION_DENIED") == 0);
  CHECK(answer.find("pid " + std::to_string(::getpid())) != std::string::npos);
  if (::geteuid() == 0) {
    REQUIRE(::chmod(node.socket().c_str(), 0666) == 0);
    REQUIRE(::chmod(node.folder_file("").c_str(), 0755) == 0);
    Child other_user([&](const Talk& talk) {
      if (::setuid(65534) != 0) throw std::runtime_error("setuid");
      talk.say(resume(node, good).to_string());
    });
    CHECK(other_user.hear().find("PERMISSION_DENIED") == 0);
  }
  // None of this has cost the session anything.
  CHECK(resume(node, good).ok());
}

TEST_CASE("when keeper and larderd have both ended the cache is gone, and clients are told so") {
  Node node;
  std::optional<Client> client(node.connect({.deadline = 20s}));
  Pool pool = must(client->open_pool(small_pool("p", Execution::kInProcess)));
  const auto blocks = must(pool.allocate(2));
  const uint64_t cache = client->cache_id();
  std::byte* mapped = must(pool.data());
  kill_larderd(node);
  node.keeper().signal(SIGKILL);
  REQUIRE(node.keeper().wait_exit(20s).has_value());
  node.start_keeper();
  node.start_larderd();
  node.await_ready();
  const auto gone = pool.allocate(1);
  REQUIRE(!gone.ok());
  INFO(gone.status().to_string());
  CHECK(gone.status().code() == ErrorCode::kStaleSession);
  CHECK(gone.status().message().find("larderd and larder-keeper have ended together") !=
        std::string::npos);
  CHECK(pool.release(blocks).code() == ErrorCode::kStaleSession);
  mapped[0] = std::byte{1};  // its own mapping is still there
  Client next = node.connect();
  CHECK(next.cache_id() != cache);
  Pool fresh = must(next.open_pool(small_pool("p", Execution::kInProcess)));
  CHECK(fresh.created());
  CHECK(must(fresh.allocate(8)).size() == 8);
}

}  // namespace
}  // namespace larder::test
