#include "client/ctl/replay/local_session.h"

#include "client/ctl/replay/references.h"
#include "larder/key_offsets.h"
#include "larder/system_error.h"

namespace larder::replay {
namespace {

// Attention on request must fit it with its output.
constexpr int64_t kArenaBytes = int64_t{128} << 20;

Result<std::vector<float>> key_offsets_of(const OpenPool& open) {
  if (open.key_offset) return elements_of(*open.key_offset);
  if (open.key_offset_file.empty()) return std::vector<float>();
  return read_key_offsets(open.key_offset_file, open.options.geometry);
}

}  // namespace

Result<std::unique_ptr<LocalSession>> LocalSession::open(const SessionSettings& settings) {
  ClientOptions options;
  options.socket_path = settings.socket_path;
  options.tenant = settings.tenant;
  options.token = settings.token;
  options.name = "replay";
  options.deadline = settings.deadline;
  options.arena_bytes = kArenaBytes;
  auto client = Client::connect(std::move(options));
  if (!client) return client.status();
  return std::unique_ptr<LocalSession>(new LocalSession(settings, std::move(*client)));
}

Outcome LocalSession::run(const Step& step, const Context& context) {
  try {
    if (const auto* merge = std::get_if<Merge>(&step.operation)) return apply(*merge, context);
    if (const auto* open = std::get_if<OpenPool>(&step.operation)) return open_pool(step, *open);
    const auto found = pools_.find(step.pool);
    if (found == pools_.end())
      return refused(ErrorCode::kNotFound,
                     "pool \"" + step.pool + "\" is not open in session \"" + step.session + "\"");
    if (std::holds_alternative<ClosePool>(step.operation)) {
      pages_.forget(step.pool);
      pools_.erase(found);
      return {};
    }
    return run_on_pool(step, *found->second, context);
  } catch (const SystemError& error) {  // one step's failure, and not the end of the replay
    return refused(ErrorCode::kInternal, error.what());
  }
}

Outcome LocalSession::open_pool(const Step& step, const OpenPool& open) {
  if (!open.unsupported.empty()) return refused(ErrorCode::kUnsupported, open.unsupported);
  auto offsets = key_offsets_of(open);
  if (!offsets) return {offsets.status(), {}};
  PoolOptions options = open.options;
  options.key_offsets = std::move(*offsets);
  options.execution = settings_.execution;
  auto pool = client_.open_pool(options);
  if (!pool) return {pool.status(), {}};
  const bool created = pool->created();
  std::unique_ptr<Entry>& entry = pools_[step.pool];
  if (entry == nullptr) {
    entry = std::make_unique<Entry>(Entry{{std::move(*pool), std::move(options)}, {}, {}});
  } else {
    entry->opened_again.push_back(std::move(*pool));
  }
  Outcome outcome = stats_of(entry->opened);
  if (!outcome.status.ok()) return outcome;
  const Pool& opened = entry->opened.pool;
  auto& parts = std::get<Parts>(outcome.value.data);
  parts.push_back({"created", {created ? 1.0 : 0.0}});
  parts.push_back({"page_bytes", {static_cast<double>(opened.page_bytes())}});
  parts.push_back({"block_stride_bytes", {static_cast<double>(opened.block_stride_bytes())}});
  parts.push_back({"layer_stride_bytes", {static_cast<double>(opened.layer_stride_bytes())}});
  return outcome;
}

Outcome LocalSession::run_on_pool(const Step& step, Entry& pool, const Context& context) {
  return std::visit(
      [&](const auto& operation) -> Outcome {
        using Kind = std::decay_t<decltype(operation)>;
        if constexpr (std::is_same_v<Kind, Stats> || std::is_same_v<Kind, Wait>) {
          return stats_of(pool.opened);
        } else if constexpr (std::is_same_v<Kind, SequenceStep>) {
          return apply(operation, pool.opened, pool.sequences);
        } else if constexpr (std::is_same_v<Kind, RawBytes>) {
          if (operation.written && !settings_.is_embedded)
            return refused(ErrorCode::kUnsupported,
                           "poke writes into other people's memory: it needs --embedded");
          return apply(operation, pool.opened, context, pages_);
        } else if constexpr (requires { apply(operation, pool.opened, context); }) {
          return apply(operation, pool.opened, context);
        } else {
          return refused(ErrorCode::kInternal, step.op + " is not an operation of a session");
        }
      },
      step.operation);
}

}  // namespace larder::replay
