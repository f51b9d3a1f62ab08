#include "tests/support/node.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cstdlib>
#include <netinet/in.h>
#include <regex>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "protocol/channel.h"

namespace larder::test {
namespace {

std::string fetch(uint16_t port, const std::string& path) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    if (::send(socket, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      char buffer[4096];
      for (ssize_t size = 0; (size = ::recv(socket, buffer, sizeof buffer, 0)) > 0;)
        answer.append(buffer, static_cast<size_t>(size));
    }
  }
  ::close(socket);
  return answer;
}

}  // namespace

std::string program(const std::string& name) { return std::string(LARDER_BIN_DIR) + "/" + name; }

Node::Node(std::vector<std::string> options) : options_(std::move(options)) {
  start_keeper();
  start_larderd();
  await_ready();
}

Node::~Node() {
  // A sanitizer's report of a process that is killed would be lost: it ends by itself first.
  if (larderd_->pid() > 0) {
    larderd_->signal(SIGTERM);
    CHECK(larderd_->wait_exit(std::chrono::seconds(20)) == 0);
  }
  if (const std::string text = log();
      text.find("ERROR: ") != std::string::npos || text.find("runtime error") != std::string::npos)
    FAIL_CHECK("larderd or its executor reported: ", text);
}

void Node::start_keeper() {
  keeper_.reset();
  keeper_.emplace(std::vector<std::string>{program("larder-keeper"), "--socket", keeper_socket()},
                  folder_.file("keeper.log"));
  // The file alone may be one that an earlier keeper has left.
  REQUIRE(eventually([&] {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    return protocol::connect_before(keeper_socket(), deadline).ok();
  }));
}

void Node::start_larderd() {
  std::vector<std::string> argv = {program("larderd"), "--socket", socket(), "--keeper",
                                   keeper_socket()};
  argv.insert(argv.end(), options_.begin(), options_.end());
  const auto add_default = [&](const char* name, const char* value) {
    if (std::find(options_.begin(), options_.end(), name) == options_.end())
      argv.insert(argv.end(), {name, value});
  };
  const char* device = std::getenv("LARDER_TEST_DEVICE");  // whose memory the pools are
  add_default("--device", device == nullptr ? "host" : device);
  add_default("--http-port", "0");
  larderd_.reset();
  larderd_.emplace(argv, folder_.file("larderd.log"));
}

void Node::replace_larderd(int signal) {
  larderd_->signal(signal);
  REQUIRE(larderd_->wait_exit(std::chrono::seconds(30)).has_value());
  start_larderd();
  await_ready();
}

void Node::await_ready() const {
  const bool ready = eventually([&] { return http("/readyz").find("200 OK") != std::string::npos; },
                                std::chrono::seconds(30));
  if (!ready) MESSAGE(log());
  REQUIRE(ready);
}

uint16_t Node::http_port() const {
  const std::string text = log();
  uint16_t port = 0;
  const std::regex pattern("event=http_serving .*port=([0-9]+)");
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it)
    port = static_cast<uint16_t>(std::stoi((*it)[1]));
  return port;
}

std::string Node::http(const std::string& path) const {
  const uint16_t port = http_port();
  return port == 0 ? "" : fetch(port, path);
}

nlohmann::json Node::ctl(const std::vector<std::string>& command) const {
  std::vector<std::string> argv = {program("larderctl"), "--socket", socket(), "--format", "json"};
  argv.insert(argv.end(), command.begin(), command.end());
  const Output output = run(argv);
  INFO(output.stderr_text);
  REQUIRE(output.exit_code == 0);
  return nlohmann::json::parse(output.stdout_text);
}

Client Node::connect(ClientOptions options) const {
  options.socket_path = socket();
  auto client = Client::connect(std::move(options));
  REQUIRE_MESSAGE(client.ok(), client.status().to_string());
  return std::move(*client);
}

PoolOptions small_pool(const std::string& name, Execution execution, KvFormat format,
                       int64_t num_blocks) {
  PoolOptions options;
  options.name = name;
  options.model = "test";
  options.geometry = {2, 1, 16, 64, 64, format, format};
  options.num_blocks = num_blocks;
  options.execution = execution;
  return options;
}

}  // namespace larder::test
