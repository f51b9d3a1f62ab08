#include "client/ctl/replay/local_session.h"

#include "client/ctl/replay/references.h"
#include "larder/key_offsets.h"
#include "larder/system_error.h"

namespace larder::replay {
namespace {

// Attention on request must fit it with its output.
constexpr int64_t kArenaBytes = int64_t{128} << 20;

Result<std::vector<float>> key_offsets_of(const KeyOffsets& source, const GroupOptions& options) {
  if (source.tensor) return elements_of(*source.tensor);
  if (source.file.empty()) return std::vector<float>();
  return read_key_offsets(source.file, options.geometry);
}

// The step's options with everything that only a session knows.
Result<PoolOptions> options_of(const OpenPool& open, const SessionSettings& settings) {
  PoolOptions options = open.options;
  options.execution = settings.execution;
  options.device = settings.device;
  for (size_t i = 0; i < open.key_offsets.size(); ++i) {
    GroupOptions& group = i == 0 ? options : options.more_groups[i - 1];
    auto offsets = key_offsets_of(open.key_offsets[i], group);
    if (!offsets) return offsets.status();
    group.key_offsets = std::move(*offsets);
  }
  return options;
}

Result<OpenedGroups> groups_of(Pool pool, const std::shared_ptr<const PoolOptions>& options) {
  OpenedGroups groups;
  for (int32_t i = 0; i < pool.num_groups(); ++i) {
    auto group = pool.group(i);
    if (!group) return group.status();
    const auto index = static_cast<size_t>(i);
    const GroupOptions& own = index == 0 ? *options : options->more_groups[index - 1];
    groups.push_back({std::move(*group), own, options, index,
                      pool.num_groups() > 1 ? own.group_name : std::string()});
  }
  return groups;
}

// A pool with one group has it under any name.
Result<OpenedPool*> group_of(const Step& step, OpenedGroups& groups) {
  if (groups.size() == 1) return &groups[0];
  if (const auto* index = std::get_if<int32_t>(&step.group)) {
    if (*index >= 0 && *index < std::ssize(groups)) return &groups[static_cast<size_t>(*index)];
    return Status(
        ErrorCode::kInvalidArgument,
        "group is " + std::to_string(*index) + ", the pool has " + std::to_string(groups.size()));
  }
  const auto& name = std::get<std::string>(step.group);
  for (OpenedPool& group : groups)
    if (group.group_name == name) return &group;
  return Status(ErrorCode::kInvalidArgument,
                "group is \"" + name + "\", which the pool does not have");
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
    if (const auto* quota = std::get_if<Quota>(&step.operation))
      return set_quota(*quota, settings_);
    if (const auto* open = std::get_if<OpenPool>(&step.operation)) return open_pool(step, *open);
    const auto* stats = std::get_if<Stats>(&step.operation);
    if (const auto* wait = std::get_if<Wait>(&step.operation)) stats = &wait->stats;
    if (stats != nullptr && step.pool.empty()) return stats_of(*stats, nullptr, settings_);
    const auto found = pools_.find(step.pool);
    if (found == pools_.end())
      return refused(ErrorCode::kNotFound,
                     "pool \"" + step.pool + "\" is not open in session \"" + step.session + "\"");
    if (std::holds_alternative<ClosePool>(step.operation)) {
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
  auto options = options_of(open, settings_);
  if (!options) return {options.status(), {}};
  auto pool = client_.open_pool(*options);
  if (!pool) return {pool.status(), {}};
  const bool created = pool->created();
  std::unique_ptr<Entry>& entry = pools_[step.pool];
  if (entry == nullptr) {
    auto groups =
        groups_of(std::move(*pool), std::make_shared<const PoolOptions>(std::move(*options)));
    if (!groups) return {groups.status(), {}};
    entry = std::make_unique<Entry>(Entry{std::move(*groups), {}, {}});
  } else {
    entry->opened_again.push_back(std::move(*pool));
  }
  OpenedPool& first = entry->groups.front();
  Outcome outcome = stats_of({}, &first, settings_);
  if (!outcome.status.ok()) return outcome;
  const auto number = [](int64_t value) { return Value{static_cast<double>(value)}; };
  auto& parts = std::get<Parts>(outcome.value.data);
  parts.push_back({"created", number(created ? 1 : 0)});
  parts.push_back({"page_bytes", number(first.pool.page_bytes())});
  parts.push_back({"block_stride_bytes", number(first.pool.block_stride_bytes())});
  parts.push_back({"layer_stride_bytes", number(first.pool.layer_stride_bytes())});
  parts.push_back({"unit_tokens", number(first.pool.unit_tokens())});
  return outcome;
}

Outcome LocalSession::access_bytes(const RawBytes& step, OpenedPool& pool, const Context& context) {
  if (!settings_.is_embedded) {
    if (!step.written) return apply(step, pool, context, pool.pool);
    return refused(ErrorCode::kUnsupported,
                   "poke writes into other people's memory: it needs --embedded");
  }
  auto source = pages_.open(pool);
  if (!source) return {source.status(), {}};
  return apply(step, pool, context, *source);
}

Outcome LocalSession::run_on_pool(const Step& step, Entry& pool, const Context& given) {
  const auto chosen = group_of(step, pool.groups);
  if (!chosen) return {chosen.status(), {}};
  OpenedPool& group = **chosen;
  const Context context{given.results, given.generations, group.group_name};
  return std::visit(
      [&](const auto& operation) -> Outcome {
        using Kind = std::decay_t<decltype(operation)>;
        if constexpr (std::is_same_v<Kind, Stats>) {
          return stats_of(operation, &group, settings_);
        } else if constexpr (std::is_same_v<Kind, Wait>) {
          return stats_of(operation.stats, &group, settings_);
        } else if constexpr (std::is_same_v<Kind, SequenceStep>) {
          return apply(operation, group, pool.sequences);
        } else if constexpr (std::is_same_v<Kind, RawBytes>) {
          return access_bytes(operation, group, context);
        } else if constexpr (requires { apply(operation, pool.groups, context); }) {
          return apply(operation, pool.groups, context);
        } else if constexpr (requires { apply(operation, group, context); }) {
          return apply(operation, group, context);
        } else {
          return refused(ErrorCode::kInternal, step.op + " is not an operation of a session");
        }
      },
      step.operation);
}

}  // namespace larder::replay
