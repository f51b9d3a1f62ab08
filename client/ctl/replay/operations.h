// Private to sessions: what each operation of a pool does. INVALID_ARGUMENT and UNSUPPORTED where
// the library says so, or where the file's own words make no sense for the pool.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "client/ctl/replay/session.h"

namespace larder::replay {

struct OpenedPool {
  Pool pool;
  PoolOptions options;
};

// The bytes of any page. Through a mapping of its own on an embedded daemon, which may write too;
// elsewhere through the session's pool, which shows blocks that are open there or published.
class PageAccess {
 public:
  PageAccess(const SessionSettings& settings) : settings_(settings) {}

  Result<std::vector<uint8_t>> read(OpenedPool& pool, int32_t layer, int32_t block);
  Status write(OpenedPool& pool, int32_t layer, int32_t block, const std::vector<uint8_t>& page);
  // Before a pool's name may stand for another pool.
  void forget(const std::string& pool) { pools_.erase(pool); }

 private:
  Result<std::byte*> find(OpenedPool& pool, int32_t layer, int32_t block);

  const SessionSettings& settings_;
  std::optional<Client> client_;
  std::map<std::string, Pool> pools_;
};

Outcome apply(const Alloc& step, OpenedPool& pool, const Context& context);
Outcome apply(const Release& step, OpenedPool& pool, const Context& context);
Outcome apply(const Publish& step, OpenedPool& pool, const Context& context);
Outcome apply(const Lookup& step, OpenedPool& pool, const Context& context);
Outcome apply(const Copy& step, OpenedPool& pool, const Context& context);
Outcome apply(const Scrub& step, OpenedPool& pool, const Context& context);
Outcome apply(const Checksum& step, OpenedPool& pool, const Context& context);
Outcome stats_of(OpenedPool& pool);

Outcome apply(const Append& step, OpenedPool& pool, const Context& context);
Outcome apply(const Read& step, OpenedPool& pool, const Context& context);
Outcome apply(const Gather& step, OpenedPool& pool, const Context& context);
Outcome apply(const Attend& step, OpenedPool& pool, const Context& context);
Outcome apply(const SparseMla& step, OpenedPool& pool, const Context& context);
Outcome apply(const Merge& step, const Context& context);

Outcome apply(const RawBytes& step, OpenedPool& pool, const Context& context, PageAccess& pages);
Outcome apply(const MovePages& step, OpenedPool& pool, const Context& context);

// The sequences of one pool, by name.
using Sequences = std::map<std::string, Sequence>;
Outcome apply(const SequenceStep& step, OpenedPool& pool, Sequences& sequences);

// For attention of every kind.
AttendOptions attend_options(const AttendFields& fields);
Outcome attention_result(const TensorView& out, std::vector<float> lse);
// Memory for an output, or why there is none.
Result<Tensor> make_output(const std::string& what, Dtype dtype, int64_t rows, int64_t heads,
                           int64_t dim, double fill);

inline bool is_mla(const OpenedPool& pool) {
  return pool.options.geometry.mla_row != MlaRow::kNone;
}

}  // namespace larder::replay
