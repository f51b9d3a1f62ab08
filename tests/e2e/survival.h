// What the tests of survival share: content that can be told apart, and what of a node must be the
// same before and after.
#pragma once

#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/e2e/child.h"
#include "tests/support/node.h"

namespace larder::test {

// A configuration file as --config takes it, in a folder of its own.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) { write(text); }
  void write(const std::string& text) const { std::ofstream(path(), std::ios::trunc) << text; }
  std::string path() const { return folder_.file("larderd.toml"); }
  std::vector<std::string> options() const { return {"--config", path()}; }

 private:
  TemporaryFolder folder_;
};

// The value, or an exception with the refusal's sentence: for children, where doctest is not.
template <typename Value>
Value must(Result<Value> result) {
  if (!result) throw std::runtime_error(result.status().to_string());
  return std::move(*result);
}
inline void must(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.to_string());
}

inline std::vector<int32_t> text_tokens(int count, int first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline std::vector<int32_t> ids_of(const std::vector<BlockHandle>& blocks) {
  std::vector<int32_t> ids;
  for (const BlockHandle& block : blocks) ids.push_back(block.id);
  return ids;
}

// Writes bytes into all layers of open blocks that depend on block, layer, place and seed. Any
// bytes are fine: nothing here computes with them.
inline void fill_blocks(Pool& pool, const std::vector<BlockHandle>& blocks, uint32_t seed) {
  const std::vector<int32_t> ids = ids_of(blocks);
  const auto page = static_cast<size_t>(pool.page_bytes());
  const int32_t num_layers = std::max(pool.geometry().num_layers, 1);
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    std::vector<std::byte> bytes(page * ids.size());
    uint32_t state = seed * 2654435761u + static_cast<uint32_t>(layer) + 1;
    for (std::byte& byte : bytes) {
      state = state * 1664525u + 1013904223u;
      byte = static_cast<std::byte>(state >> 24);
    }
    must(pool.write_pages(layer, ids, bytes));
  }
}

inline std::vector<uint64_t> checksums(Pool& pool, const std::vector<BlockHandle>& blocks) {
  return must(pool.checksum(ids_of(blocks)));
}

// Pools as larderctl shows them, without the figures that count from the daemon's start.
inline nlohmann::json pools_of(const Node& node) {
  nlohmann::json pools = node.ctl({"pools"});
  for (auto& pool : pools) {
    pool.erase("lookup_tokens_total");
    pool.erase("lookup_hit_tokens_total");
  }
  return pools;
}

// Sessions as larderctl shows them, without its own and without times.
inline nlohmann::json sessions_of(const Node& node) {
  nlohmann::json sessions = nlohmann::json::array();
  for (auto session : node.ctl({"sessions"})) {
    if (session["client_name"] == "larderctl") continue;
    session.erase("connected_us");
    sessions.push_back(session);
  }
  return sessions;
}

inline nlohmann::json group_of(const Node& node, const std::string& pool_name) {
  for (const auto& pool : node.ctl({"pools"}))
    if (pool["name"] == pool_name) return pool["groups"][0];
  return {};
}

inline int64_t count_closing(const Node& node) {
  int64_t count = 0;
  for (const auto& session : node.ctl({"sessions"})) count += session["closing"] == true;
  return count;
}

}  // namespace larder::test
