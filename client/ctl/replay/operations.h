// Private to sessions: what each operation of a pool does. INVALID_ARGUMENT and UNSUPPORTED where
// the library says so, or where the file's own words make no sense for the pool.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "client/ctl/replay/session.h"

namespace larder::replay {

// One group of a pool that is open.
struct OpenedPool {
  Pool pool;
  GroupOptions options;
  std::shared_ptr<const PoolOptions> whole;
  size_t group_index = 0;
  std::string group_name = {};  // empty where the pool has one group
};
using OpenedGroups = std::vector<OpenedPool>;

// The bytes of any page: through a mapping of its own on an embedded daemon, which may write too.
class PageAccess {
 public:
  PageAccess(const SessionSettings& settings) : settings_(settings) {}

  // The same group, opened for one step: what is mapped now may have been given back by the next.
  Result<Pool> open(const OpenedPool& pool);

 private:
  const SessionSettings& settings_;
  std::optional<Client> client_;
};

Outcome apply(const Alloc& step, OpenedPool& pool, const Context& context);
Outcome apply(const Release& step, OpenedPool& pool, const Context& context);
Outcome apply(const Publish& step, OpenedGroups& groups, const Context& context);
Outcome apply(const Lookup& step, OpenedGroups& groups, const Context& context);
Outcome apply(const Copy& step, OpenedPool& pool, const Context& context);
Outcome apply(const Scrub& step, OpenedPool& pool, const Context& context);
Outcome apply(const Checksum& step, OpenedPool& pool, const Context& context);
Outcome apply(const Resize& step, OpenedPool& pool, const Context& context);
Outcome apply(const Evict& step, OpenedPool& pool, const Context& context);
// The figures of the group, and of the tenant where one is named. `pool` may be nullptr.
Outcome stats_of(const Stats& step, OpenedPool* pool, const SessionSettings& settings);
Outcome set_quota(const Quota& step, const SessionSettings& settings);

Outcome apply(const Append& step, OpenedPool& pool, const Context& context);
Outcome apply(const Read& step, OpenedPool& pool, const Context& context);
Outcome apply(const Gather& step, OpenedPool& pool, const Context& context);
Outcome apply(const Attend& step, OpenedPool& pool, const Context& context);
Outcome apply(const SparseMla& step, OpenedPool& pool, const Context& context);
Outcome apply(const Merge& step, const Context& context);

// `source`: where the bytes are.
Outcome apply(const RawBytes& step, OpenedPool& pool, const Context& context, Pool& source);
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
