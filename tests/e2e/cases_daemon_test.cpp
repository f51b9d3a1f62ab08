// Acceptance cases about larderd's life, its files and its pages
// (tests/cases/README.md has the table).
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <grp.h>
#include <set>
#include <sstream>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "client/control_connection.h"
#include "protocol/notices.h"
#include "tests/support/node.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// larderd --socket PATH to its end, with a keeper that is there.
Output larderd_at(const Node& node, const std::string& path) {
  TemporaryFolder folder;
  Process keeper({program("larder-keeper"), "--socket", folder.file("k")}, folder.file("log"));
  REQUIRE(eventually([&] { return ::access(folder.file("k").c_str(), F_OK) == 0; }));
  Output output = run(
      {program("larderd"), "--socket", path, "--keeper", folder.file("k"), "--http-port", "-1"});
  CHECK(has(node.http("/readyz"), "200 OK"));  // the one that serves is not disturbed
  return output;
}

TEST_CASE("case 66: fifty clients come back at once") {
  Node node;
  std::vector<Client> clients;
  std::vector<Pool> pools;
  for (int i = 0; i < 50; ++i) {
    clients.push_back(node.connect({.arena_bytes = 0}));
    auto pool =
        clients.back().open_pool(small_pool("p", Execution::kInProcess, KvFormat::kNvfp4, 100));
    REQUIRE(pool.ok());
    REQUIRE(pool->allocate(1).ok());
    pools.push_back(std::move(*pool));
  }
  const uint64_t boot_id = clients[0].boot_id();
  const uint64_t cache_id = clients[0].cache_id();
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(20s).has_value());
  node.start_larderd();
  node.await_ready();
  for (size_t i = 0; i < clients.size(); ++i) {
    CHECK(pools[i].allocate(1).ok());
    CHECK(clients[i].resumes() == 1);
    CHECK(clients[i].boot_id() != boot_id);
    CHECK(clients[i].cache_id() == cache_id);
  }
  CHECK(pools[0].stats().value().at(0).open == 100);
  CHECK(pools[0].allocate(1).status().code() == ErrorCode::kResourceExhausted);
}

TEST_CASE("case 67: larderd takes no path that something else has") {
  Node node;
  const std::string file = node.folder_file("file");
  std::ofstream(file) << "precious";
  const Output at_file = larderd_at(node, file);
  CHECK(at_file.exit_code == 1);
  CHECK(has(at_file.stderr_text, "not a socket"));
  CHECK(read_file(file) == "precious");
  const std::string folder = node.folder_file("folder");
  std::filesystem::create_directory(folder);
  const Output at_folder = larderd_at(node, folder);
  CHECK(at_folder.exit_code == 1);
  CHECK(has(at_folder.stderr_text, "not a socket"));
  CHECK(std::filesystem::is_directory(folder));
  const Output at_socket = larderd_at(node, node.socket());
  CHECK(at_socket.exit_code == 1);
  CHECK(has(at_socket.stderr_text, "already running"));
  CHECK(has(at_socket.stderr_text, std::to_string(node.larderd().pid())));
}

// What Client::connect says to uid and gid 65534.
std::string refusal_for_nobody(const std::string& socket) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string text = "cannot change the user";
    if (::setgroups(0, nullptr) == 0 && ::setgid(65534) == 0 && ::setuid(65534) == 0) {
      const auto client = Client::connect({.socket_path = socket});
      text = client.ok() ? "connected" : client.status().to_string();
    }
    (void)!::write(ends[1], text.data(), text.size());
    ::_exit(0);
  }
  ::close(ends[1]);
  char text[1024] = {};
  (void)!::read(ends[0], text, sizeof text - 1);
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return text;
}

TEST_CASE("case 68: another group is told whose the socket is, and a folder is not opened up") {
  Node node;
  const std::string folder = std::filesystem::path(node.socket()).parent_path();
  struct stat info {};
  REQUIRE(::stat(folder.c_str(), &info) == 0);
  CHECK((info.st_mode & S_IWOTH) == 0);
  if (::geteuid() != 0) {
    MESSAGE("who is not root cannot try to be somebody else");
    return;
  }
  REQUIRE(::chmod(folder.c_str(), 0755) == 0);
  const std::string text = refusal_for_nobody(node.socket());
  CHECK(has(text, "PERMISSION_DENIED"));
  CHECK(has(text, node.socket()));
  CHECK(has(text, "group"));
  CHECK(has(text, ::getgrgid(::getegid())->gr_name));
}

// Series of a page of metrics: the lines without their values.
std::set<std::string> series_of(const std::string& page) {
  std::set<std::string> series;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("larder_")) series.insert(line.substr(0, line.rfind(' ')));
  return series;
}

TEST_CASE("case 85: sessions and clients' names make no series, and units are in the names") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  REQUIRE(pool->allocate(1).ok());
  const std::set<std::string> before = series_of(node.http("/metrics"));
  for (int i = 0; i < 1000; ++i) {
    Client brief = node.connect({.name = "client " + std::to_string(i), .arena_bytes = 0});
    if (i % 100 == 0) CHECK(brief.open_pool(small_pool("p", Execution::kInProcess)).ok());
  }
  const std::string page = node.http("/metrics");
  CHECK(series_of(page) == before);
  CHECK(!has(page, "client 7"));
  CHECK(!has(page, "pid="));
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("# TYPE ")) continue;
    INFO(line);
    const bool is_counter = line.ends_with(" counter");
    const std::string name = line.substr(7, line.rfind(' ') - 7);
    CHECK(name.ends_with("_total") == is_counter);
    for (const char* unit : {"_ms", "_us", "_kib", "_mib"}) CHECK(!name.ends_with(unit));
  }
}

TEST_CASE("case 86: a daemon that drains is alive, takes nobody new, and ends within its grace") {
  TemporaryFolder folder;
  const std::string config = folder.file("larderd.toml");
  std::ofstream(config) << "shutdown_grace_ms = 1000\n";
  Node node({"--config", config});
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  // Who listens for notices is told.
  protocol::Connect hello;
  hello.tenant = "default";
  hello.role = "append";
  hello.notices = true;
  auto listener = ControlConnection::connect(node.socket(), hello, 10s).value();
  const std::vector<OwnFd> fds = listener.take_fds();
  REQUIRE(!fds.empty());
  node.larderd().signal(SIGTERM);
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  const auto received = protocol::receive_before(fds[0].get(), deadline);
  REQUIRE(received.ok());
  const auto notice = protocol::decode_notice(received->bytes);
  REQUIRE(notice.ok());
  CHECK(std::holds_alternative<protocol::ShuttingDown>(*notice));
  CHECK(has(node.http("/livez"), " 200 "));
  CHECK(has(node.http("/readyz"), " 503 "));
  const auto late = Client::connect({.socket_path = node.socket()});
  REQUIRE(!late.ok());
  CHECK(late.status().code() == ErrorCode::kShuttingDown);
  CHECK(pool->allocate(1).ok());  // those who are there are served
  CHECK(node.larderd().wait_exit(20s) == 0);
}

TEST_CASE("case 87: a second signal ends larderd at once, SIGHUP and SIGPIPE do not end it") {
  Node node;
  node.larderd().signal(SIGHUP);
  for (int i = 0; i < 20; ++i) {
    // Gone before the answer can be written.
    protocol::Connect hello;
    hello.tenant = "default";
    hello.role = "append";
    auto vanishing = ControlConnection::connect(node.socket(), hello, 10s).value();
    protocol::Request request{1000, 0, protocol::ListPools{}};
    REQUIRE(vanishing.send(request, std::chrono::steady_clock::now() + 10s).ok());
  }
  CHECK(node.ctl({"status"})["pid"] == node.larderd().pid());
  const Client stays = node.connect();
  node.larderd().signal(SIGTERM);
  REQUIRE(eventually([&] { return has(node.http("/readyz"), " 503 "); }));
  node.larderd().signal(SIGINT);
  CHECK(node.larderd().wait_exit(20s) == 1);
  CHECK(::access(node.socket().c_str(), F_OK) != 0);
  CHECK(::access((node.socket() + ".lock").c_str(), F_OK) != 0);
}

TEST_CASE("case 88: two nodes live side by side, and a clean end leaves no file") {
  Node one;
  Node two;
  Client first = one.connect();
  Client second = two.connect();
  auto pool = first.open_pool(small_pool("p", Execution::kInProcess));
  auto twin = second.open_pool(small_pool("p", Execution::kInProcess));
  REQUIRE(pool.ok());
  REQUIRE(twin.ok());
  CHECK(pool->created());
  CHECK(twin->created());
  CHECK(pool->allocate(8).ok());
  CHECK(twin->stats().value().at(0).free == 8);
  CHECK(one.ctl({"status"})["cache_id"] != two.ctl({"status"})["cache_id"]);

  Node brief;
  {
    Client client = brief.connect();
    auto gone = client.open_pool(small_pool("p", Execution::kOnRequest));
    REQUIRE(gone.ok());
    REQUIRE(gone->allocate(3).ok());
  }
  brief.larderd().signal(SIGTERM);
  CHECK(brief.larderd().wait_exit(20s) == 0);
  brief.keeper().signal(SIGTERM);
  CHECK(brief.keeper().wait_exit(20s) == 0);
  const std::string folder = std::filesystem::path(brief.socket()).parent_path();
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    CHECK(entry.path().extension() == ".log");
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    CHECK(!has(entry.path().filename(), "larder"));
}

}  // namespace
}  // namespace larder::test
