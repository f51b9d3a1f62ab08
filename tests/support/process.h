// A child process of a test: started, waited for, killed; never left behind.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

namespace larder::test {

class Process {
 public:
  // argv[0] is the executable's path. stdout and stderr go to `log_path` (appended), or are
  // inherited when it is empty.
  Process(const std::vector<std::string>& argv, const std::string& log_path);
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  ~Process();  // SIGKILL, if it still runs

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  // The exit status (128 + signal for a signal's death), or nothing when it still runs then.
  std::optional<int> wait_exit(std::chrono::milliseconds limit);

 private:
  pid_t pid_;
};

struct Output {
  int exit_code;
  std::string stdout_text;
  std::string stderr_text;
};
// Runs to the end. Fails the test (throws) after two minutes.
Output run(const std::vector<std::string>& argv);

// Whether a daemon takes connections at its socket. The file is there a moment before; it gets its
// mode afterwards.
bool listens(const std::string& socket_path);

// Looks again every few milliseconds until `condition` holds; false after `limit`.
bool eventually(const std::function<bool()>& condition,
                std::chrono::milliseconds limit = std::chrono::seconds(10));

// A folder of the test's own, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string read_file(const std::string& path);

}  // namespace larder::test
