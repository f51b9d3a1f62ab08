// From the bytes of a replay file to typed steps. Any bytes may come: what is refused is named by
// step and field, and nothing has been run then.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "client/ctl/replay/steps.h"
#include "larder/status.h"

namespace larder::replay {

inline constexpr int64_t kMaxFileBytes = int64_t{16} << 20;
inline constexpr size_t kMaxSteps = 10'000;
inline constexpr size_t kMaxJsonDepth = 24;
inline constexpr size_t kMaxSlotsPerStep = size_t{1} << 22;
inline constexpr size_t kMaxTokensPerStep = size_t{1} << 22;
inline constexpr size_t kMaxBlocksPerStep = size_t{1} << 20;
inline constexpr size_t kMaxSequencesPerStep = size_t{1} << 16;

struct ReplayFile {
  std::string path;
  std::string name;  // the path where the file states none
  std::vector<Step> steps;
};

// What earlier steps have established, as far as it is known before anything runs.
struct Scope {
  PartNames results;                                    // `as` names and their parts
  std::map<std::string, int64_t> num_blocks;            // of results whose count is known
  std::set<std::string> block_results;                  // results that hold blocks
  std::set<std::string> state_results;                  // {"out", "lse"}
  std::set<std::string> byte_results;                   // hex
  std::set<std::string> sessions;                       // ever opened; "main" always is
  std::set<std::pair<std::string, std::string>> pools;  // session, pool: ever opened
  // session, pool: the names of its groups, where there are several
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> groups;
  std::set<std::pair<std::string, std::string>> sequences;  // session, sequence: ever begun
};

// INVALID_ARGUMENT: "PATH: step 3 (append): field \"k.shape\" ...". Paths in the file are relative
// to its folder.
Result<ReplayFile> parse_replay(std::string_view text, const std::filesystem::path& path);
Result<ReplayFile> read_replay(const std::filesystem::path& path);

// One step. nullptr: names of earlier steps are not looked at.
Step parse_step(const json& source, size_t number, const std::filesystem::path& folder,
                Scope* scope, Problem& problem);

}  // namespace larder::replay
