// What benchmarks with real processes share: the processes, figures as JSON, and the conditions.
// Everything is in microseconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <memory>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "larder/check.h"
#include "larder/own_fd.h"
#include "larder/status.h"
#include "tests/support/process.h"

namespace larder::test {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

inline double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

template <typename Value>
Value must(Result<Value> result) {
  LARDER_CHECK(result.ok(), result.status().to_string());
  return std::move(*result);
}
inline void must(const Status& status) { LARDER_CHECK(status.ok(), status.to_string()); }

inline json show(std::vector<double> times_us) {
  std::sort(times_us.begin(), times_us.end());
  const auto at = [&](double part) {
    return times_us[static_cast<size_t>(part * static_cast<double>(times_us.size() - 1))];
  };
  return {{"count", times_us.size()},
          {"min_us", times_us.front()},
          {"p50_us", at(0.5)},
          {"p99_us", at(0.99)},
          {"max_us", times_us.back()}};
}

// A port that was free a moment ago.
inline uint16_t free_port() {
  const OwnFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  LARDER_CHECK(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  LARDER_CHECK(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
  return ntohs(address.sin_port);
}

class Daemons {
 public:
  // `options` are further ones of larderd's.
  explicit Daemons(std::vector<std::string> options = {"--device", "host", "--memory-bytes",
                                                       "16GiB"})
      : port_(free_port()), options_(std::move(options)) {
    keeper_ = std::make_unique<Process>(
        std::vector<std::string>{program("larder-keeper"), "--socket", path("keeper.sock")}, "");
    LARDER_CHECK(eventually([&] { return listens(path("keeper.sock")); }));
    start_larderd();
  }

  std::string socket() const { return path("larderd.sock"); }
  // From exec to a page that says ok.
  double start_larderd() {
    const auto start = Clock::now();
    spawn_larderd();
    while (!is_ready()) LARDER_CHECK(us_since(start) < 30e6, "larderd is not ready after 30 s");
    return us_since(start);
  }
  void spawn_larderd() {
    std::vector<std::string> argv = {program("larderd"),
                                     "--socket",
                                     socket(),
                                     "--keeper",
                                     path("keeper.sock"),
                                     "--http-port",
                                     std::to_string(port_),
                                     "--log-level",
                                     "warning"};
    argv.insert(argv.end(), options_.begin(), options_.end());
    larderd_ = std::make_unique<Process>(argv, "");
  }
  // From exec to a connection that larderd takes: its executors come later.
  double start_larderd_until_serving() {
    const auto start = Clock::now();
    spawn_larderd();
    while (!takes_connections()) LARDER_CHECK(us_since(start) < 30e6, "larderd does not serve");
    return us_since(start);
  }
  void kill_larderd() {
    larderd_->signal(SIGKILL);
    LARDER_CHECK(larderd_->wait_exit(std::chrono::seconds(10)).has_value());
  }

 private:
  static std::string program(const std::string& name) {
    return std::string(LARDER_BIN_DIR) + "/" + name;
  }
  std::string path(const std::string& name) const { return folder_.file(name); }
  bool takes_connections() const {
    const OwnFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    LARDER_CHECK(this->socket().size() < sizeof address.sun_path);
    std::copy_n(this->socket().c_str(), this->socket().size() + 1, address.sun_path);
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      return true;
    ::sched_yield();
    return false;
  }
  bool is_ready() const {
    const OwnFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port_);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      ::sched_yield();  // the processor is larderd's
      return false;
    }
    constexpr std::string_view kRequest = "GET /readyz HTTP/1.0\r\n\r\n";
    if (::send(socket.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL) < 0) return false;
    std::string answer(512, '\0');
    const ssize_t size = ::recv(socket.get(), answer.data(), answer.size(), 0);
    return size > 0 && answer.find(" 200 ") != std::string::npos;
  }

  TemporaryFolder folder_;
  uint16_t port_;
  std::vector<std::string> options_;
  std::unique_ptr<Process> keeper_;
  std::unique_ptr<Process> larderd_;
};

inline std::string line_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key)) return line.substr(line.find(':') + 2);
  return "unknown";
}

inline json conditions() {
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  double load[3] = {};
  (void)!::getloadavg(load, 3);
  return {{"date", date},
          {"cpu", line_of("/proc/cpuinfo", "model name")},
          {"cpus", ::sysconf(_SC_NPROCESSORS_ONLN)},
          {"load_1min", load[0]}};
}

}  // namespace larder::test
