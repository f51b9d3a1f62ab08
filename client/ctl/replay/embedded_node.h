// A daemon of the replay's own: keeper, larderd and executor in a temporary folder, which are
// stopped and removed with it, whatever happens.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/control_connection.h"
#include "client/ctl/replay/child_process.h"
#include "larder/status.h"

namespace larder::replay {

// A folder that nobody else may read, removed with everything in it: when this goes, and before the
// process ends by SIGINT, SIGTERM or SIGHUP.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  struct Watcher;
  std::string path_;
  std::unique_ptr<Watcher> watcher_;
};

class EmbeddedNode {
 public:
  // Starts the processes, found beside this program or in PATH, and waits until they are ready.
  // UNAVAILABLE with the daemon's log when it does not come up.
  static Result<std::unique_ptr<EmbeddedNode>> start(const std::vector<std::string>& tenants,
                                                     int64_t memory_bytes,
                                                     const std::string& device);
  ~EmbeddedNode();

  std::string socket_path() const { return folder_.file("larderd.sock"); }
  // SIGKILL or SIGTERM, then a new larderd; milliseconds until it is ready.
  Result<double> restart_daemon(bool is_kill);
  // Each ends the process and waits until the daemon is ready with a new one.
  Status kill_executor();
  Status kill_keeper();
  // Ends all. INTERNAL with the log if larderd had died, or ends with an error.
  Status stop();

 private:
  EmbeddedNode() = default;
  Status start_keeper();
  void start_larderd();
  // Asks for the daemon's status until `wanted` says yes.
  Status await(const std::string& what,
               const std::function<bool(const protocol::DaemonStatus&)>& wanted);
  Result<protocol::DaemonStatus> ask() const;
  void count_deaths();
  std::string log_end() const;

  uint64_t num_kills_ = 0;  // of this larderd's executors, by kill_executor
  uint64_t num_unasked_deaths_ = 0;
  TemporaryFolder folder_;
  std::optional<ChildProcess> keeper_;
  std::optional<ChildProcess> larderd_;
};

}  // namespace larder::replay
