// A node: keeper and larderd as real processes in a folder of the test's own.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "larder/client.h"
#include "tests/support/process.h"

namespace larder::test {

class Node {
 public:
  // Starts both and waits until larderd is ready. `options` are further ones of larderd's.
  explicit Node(std::vector<std::string> options = {});
  ~Node();

  std::string socket() const { return folder_.file("larderd.sock"); }
  std::string keeper_socket() const { return folder_.file("keeper.sock"); }
  std::string folder_file(const std::string& name) const { return folder_.file(name); }
  std::string log() const { return read_file(folder_.file("larderd.log")); }
  Process& larderd() { return *larderd_; }
  Process& keeper() { return *keeper_; }

  void start_keeper();
  void start_larderd();
  // Further options of the larderds that are started from now on.
  void set_options(std::vector<std::string> options) { options_ = std::move(options); }
  // Ends larderd with this signal and starts another in its place, which is ready on return.
  void replace_larderd(int signal);
  // Waits until /readyz says ok.
  void await_ready() const;
  // Of larderd's HTTP server; 0: there has been none.
  uint16_t http_port() const;
  // A page of it: status line and body.
  std::string http(const std::string& path) const;
  // larderctl status: pid of the executor.
  pid_t executor_pid() const { return ctl({"status"})["executor_pid"].get<pid_t>(); }
  // larderctl COMMAND... --format json; fails the test unless it exits 0.
  nlohmann::json ctl(const std::vector<std::string>& command) const;

  // Connects or fails the test.
  Client connect(ClientOptions options = {}) const;

 private:
  TemporaryFolder folder_;
  std::vector<std::string> options_;
  std::optional<Process> keeper_;
  std::optional<Process> larderd_;
};

// The path of one of our programs.
std::string program(const std::string& name);

// A small pool: 2 layers, 1 KV head, dim 64, blocks of 16 tokens.
PoolOptions small_pool(const std::string& name, Execution execution,
                       KvFormat format = KvFormat::kNvfp4, int64_t num_blocks = 8);

}  // namespace larder::test
