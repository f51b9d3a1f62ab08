// larderctl replay: which daemon, which files, what is printed, and the exit status.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace larder::replay {

struct ReplayOptions {
  std::vector<std::string> files;
  std::string socket_path;  // empty: the default path
  bool socket_given = false;
  bool embedded = false;
  std::string token;
  std::string memory = "host";
  std::string device;
  std::optional<size_t> only;
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  int64_t memory_bytes = int64_t{64} << 30;  // of an embedded daemon; used pages alone are real
  bool json = false;
};

// 0: all expectations hold. 1: some do not. 2: a file cannot be used, and nothing has been run.
// 3: there is no daemon.
int run_replay(const ReplayOptions& options);

}  // namespace larder::replay
