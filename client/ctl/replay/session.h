// Where steps run: a session of the daemon, in this process or in a child.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "client/ctl/replay/steps.h"
#include "client/ctl/replay/value.h"

namespace larder::replay {

// The latest generation seen of each block of a pool, for plain ids in steps: by the group's name
// (empty where the pool has one group) and the id.
using Generations = std::map<std::pair<std::string, int32_t>, uint32_t>;

// What a step may refer to.
struct Context {
  const Results& results;
  const Generations& generations;  // of the step's pool
  std::string group = {};          // whose blocks are meant; empty where the pool has one
};

struct SessionSettings {
  std::string socket_path;
  std::string tenant = "default";
  std::string token;
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  Execution execution = Execution::kOnRequest;
  std::string device = {};   // of the pools
  bool is_embedded = false;  // the daemon is the replay's own: any block may be seen and written
  std::string folder;        // paths in steps are relative to it
};

class Session {
 public:
  virtual ~Session() = default;
  // Runs an operation of a session or a pool. Refusals are outcomes, never exceptions.
  virtual Outcome run(const Step& step, const Context& context) = 0;
};

}  // namespace larder::replay
