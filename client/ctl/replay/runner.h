// Runs the steps of one file against a daemon and judges what they yield.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "allocator/memory_devices.h"
#include "client/ctl/replay/embedded_node.h"
#include "client/ctl/replay/parse.h"
#include "client/ctl/replay/session.h"

namespace larder::replay {

enum class Verdict : uint8_t { kOk, kFail, kSkipped };

struct StepReport {
  const Step* step = nullptr;
  Verdict verdict = Verdict::kOk;
  Outcome outcome;
  std::vector<Finding> findings;
  std::string reason;  // of a failure or a skip that is no finding
  double milliseconds = 0;
};

struct RunSettings {
  std::string socket_path;
  std::string token;
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  EmbeddedNode* node = nullptr;      // the daemon, where it is the replay's own
  std::optional<size_t> only;        // run to this step, and report it alone
  std::string device = kHostDevice;  // of the pools
};

// A daemon for this file alone: its tenants are those that the file names.
Result<std::unique_ptr<EmbeddedNode>> start_node(const ReplayFile& file, int64_t memory_bytes,
                                                 const std::string& device);

class Runner {
 public:
  using Observer = std::function<void(const StepReport&)>;

  // `observe` is told about every step that counts. File, settings and node outlive the runner.
  Runner(const ReplayFile& file, RunSettings settings, Observer observe)
      : file_(file), settings_(std::move(settings)), observe_(std::move(observe)) {}

  void run();
  // Pools that the file's steps have created, as tenant and name.
  const std::set<std::pair<std::string, std::string>>& created_pools() const {
    return created_pools_;
  }

 private:
  struct OpenedSession {
    std::string tenant;
    std::unique_ptr<Session> session;
  };

  StepReport run_step(const Step& step);
  // Why the step cannot run: what it needs was skipped (true) or has failed.
  std::optional<std::pair<bool, std::string>> missing(const Step& step) const;
  Outcome execute(const Step& step);
  Outcome execute_on_node(const Step& step);
  Outcome open_session(const Step& step, const OpenSession& open);
  Outcome kill_session(const Step& step);
  Outcome wait(const Step& step, const Wait& wait);
  Outcome run_in_session(const Step& step);
  void note_skipped(const Step& step);
  void note_generations(const Step& step, const Value& value);
  void note_result(const Step& step, const Outcome& outcome);
  Generations& generations_of(const Step& step);
  JudgedOn judged_on() const {
    return settings_.device == kHostDevice ? JudgedOn::kHost : JudgedOn::kGpu;
  }

  const ReplayFile& file_;
  const RunSettings settings_;
  const Observer observe_;
  Results results_;
  std::map<std::string, OpenedSession> sessions_;
  std::set<std::string> ended_sessions_;
  std::map<std::pair<std::string, std::string>, Generations> generations_;  // tenant, pool
  std::set<std::string> skipped_results_;
  std::set<std::pair<std::string, std::string>> skipped_pools_;  // session, pool
  std::set<std::pair<std::string, std::string>> created_pools_;  // tenant, pool
};

}  // namespace larder::replay
