// A process of ours: started, signalled, waited for; it never outlives this one.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

namespace larder::replay {

class ChildProcess {
 public:
  // argv[0] is the executable's path. stdout and stderr are appended to `log_path`, or inherited
  // where it is empty. `descriptor`, unless -1, becomes descriptor 3 of the child, which otherwise
  // gets the standard ones alone. Throws SystemError.
  explicit ChildProcess(const std::vector<std::string>& argv, const std::string& log_path = "",
                        int descriptor = -1);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess();  // SIGKILL, if it still runs

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  // The exit status (128 + signal for a signal's death), or nothing when it still runs then.
  std::optional<int> wait_exit(std::chrono::milliseconds limit);

 private:
  pid_t pid_ = 0;
  std::optional<int> exit_;  // once it has ended
};

// Waits a moment between two looks at something that changes elsewhere.
void pause_between_looks();

// The folder of this program's own executable.
std::string program_folder();

}  // namespace larder::replay
