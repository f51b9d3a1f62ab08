#include <algorithm>
#include <numeric>

#include "client/client_impl.h"
#include "client/pool_options.h"
#include "protocol/limits.h"

namespace larder {
namespace {

// A unit that no token list is as long as would never be published.
constexpr int64_t kMaxUnitTokens = protocol::kMaxTokensInArena;

Status check_deadline(std::chrono::microseconds deadline) {
  const auto longest = std::chrono::microseconds(protocol::kMaxDeadlineUs);
  if (deadline.count() > 0 && deadline <= longest) return {};
  return {ErrorCode::kInvalidArgument, "deadline is " + std::to_string(deadline.count()) +
                                           " us, 1 to " + std::to_string(longest.count()) +
                                           " are allowed"};
}

// Of a pool with several groups a unit is what the longest of its common prefixes grow by.
Status check_unit(const std::vector<GroupView>& views) {
  int64_t unit = 1;
  for (const GroupView& view : views) {
    unit = std::lcm(unit, int64_t{view.geometry.block_tokens});
    if (unit > kMaxUnitTokens)
      return {ErrorCode::kInvalidArgument,
              "block_tokens: the least common multiple over the groups is " + std::to_string(unit) +
                  ", at most " + std::to_string(kMaxUnitTokens) + " is allowed"};
  }
  return {};
}

Result<std::vector<GroupView>> view_groups(const protocol::PoolSpec& spec) {
  std::vector<GroupView> views;
  for (const protocol::GroupSpec& group : spec.groups) {
    Result<GroupView> view = view_group(group);
    if (!view && spec.groups.size() == 1) return view.status();
    if (!view)
      return Status(view.status().code(),
                    "group \"" + group.name + "\": " + view.status().message());
    views.push_back(std::move(*view));
  }
  if (Status status = check_unit(views); !status.ok()) return status;
  return views;
}

}  // namespace

protocol::Block to_wire(const BlockHandle& block) { return {block.id, block.generation}; }

std::vector<protocol::Block> to_wire(std::span<const BlockHandle> blocks) {
  std::vector<protocol::Block> result;
  result.reserve(blocks.size());
  for (const BlockHandle& block : blocks) result.push_back(to_wire(block));
  return result;
}

BlockHandle from_wire(const protocol::Block& block) { return {block.id, block.generation}; }

Status Client::Impl::start_ring(std::chrono::steady_clock::time_point deadline) {
  if (Status status = session->ended(); !status.ok()) return status;
  return ring->start(deadline);
}

Result<protocol::TokenList> Client::Impl::token_list(std::span<const int32_t> tokens) {
  // Well below the message's size, so that block lists have room beside the tokens.
  constexpr size_t kInlineTokens = 4096;
  if (tokens.size() <= kInlineTokens || !ring)
    return protocol::TokenList(std::vector<int32_t>(tokens.begin(), tokens.end()));
  if (Status status = start_ring(deadline()); !status.ok()) return status;
  auto array = ring->stage(tokens.data(), tokens.size());
  if (!array) return array.status();
  return protocol::TokenList(protocol::ArenaRange{array->offset_bytes, array->count});
}

Status Client::Impl::stage_key_offsets(protocol::PoolSpec& spec) {
  bool started = false;
  for (protocol::GroupSpec& group : spec.groups) {
    auto* attention = std::get_if<protocol::AttentionGroup>(&group.kind);
    if (attention == nullptr) continue;
    const auto& offsets = std::get<std::vector<float>>(attention->key_offsets);
    if (offsets.size() <= protocol::kMaxFloatsInline) continue;
    if (!ring)
      return {ErrorCode::kInvalidArgument, "key_offsets has " + std::to_string(offsets.size()) +
                                               " entries: more than " +
                                               std::to_string(protocol::kMaxFloatsInline) +
                                               " travel through the arena, and arena_bytes is 0"};
    if (!started)
      if (Status status = start_ring(deadline()); !status.ok()) return status;
    started = true;
    auto array = ring->stage(offsets.data(), offsets.size());
    if (!array) return array.status();
    attention->key_offsets = protocol::ArenaRange{array->offset_bytes, array->count};
  }
  return {};
}

Result<Client> Client::connect(ClientOptions options) {
  if (Status status = check_deadline(options.deadline); !status.ok()) return status;
  protocol::Connect hello;
  hello.tenant = options.tenant;
  hello.token = options.token;
  hello.role = "append";
  hello.client_name = options.name;
  hello.arena_bytes = static_cast<uint64_t>(std::max<int64_t>(options.arena_bytes, 0));
  auto session = Session::open(options.socket_path, hello, options.deadline);
  if (!session) return session.status();
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  impl->session = std::move(*session);
  if (hello.arena_bytes > 0) {
    auto ring = RequestRing::open(impl->session->take_fds(), impl->session->connected().arena_bytes,
                                  [session = impl->session.get()] { return session->ended(); });
    if (!ring) return ring.status();
    impl->ring.emplace(std::move(*ring));
  }
  impl->session->start([memories = &impl->memories](const protocol::Unmap& unmap) {
    memories->unmap(unmap.pool, unmap.group, unmap.index);
  });
  return Client(std::move(impl));
}

// Maps the pool here, and makes ready what runs kernels on it.
Status Client::Impl::take_in(OpenedPool& pool, void* stream) {
  if (pool.device != kHostDevice) {
    auto calls = kernels::DeviceCalls::create(pool.device, stream);
    if (!calls) return calls.status();
    pool.calls = std::move(*calls);
  }
  for (const auto& group : pool.groups) {
    if (Status status = group->map_memory(); !status.ok()) return status;
    if (pool.calls != nullptr)
      if (Status status = group->prepare_calls(stream != nullptr); !status.ok()) return status;
  }
  return {};
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&& other) noexcept {
  Client old(std::move(impl_));  // says goodbye
  impl_ = std::move(other.impl_);
  return *this;
}
Client::~Client() = default;

uint64_t Client::session_id() const { return impl_->session->connected().session; }
uint64_t Client::boot_id() const { return impl_->session->boot_id(); }
uint64_t Client::cache_id() const { return impl_->session->connected().cache_id; }
uint64_t Client::resumes() const { return impl_->session->resumes(); }
std::chrono::microseconds Client::longest_outage() const {
  return impl_->session->longest_outage();
}

Result<Pool> Client::open_pool(const PoolOptions& options) {
  if (options.execution == Execution::kOnRequest && !impl_->ring)
    return Status(ErrorCode::kInvalidArgument,
                  "execution on request needs an arena, and arena_bytes is 0");
  if (Status status = check_options(options); !status.ok()) return status;
  protocol::PoolSpec spec = to_wire(options);
  auto views = view_groups(spec);
  if (!views) return views.status();
  if (Status status = impl_->stage_key_offsets(spec); !status.ok()) return status;
  auto reply = impl_->session->call_for<protocol::PoolOpened>(protocol::OpenPool{std::move(spec)});
  if (!reply) return reply.status();
  // From here on a refusal closes the pool again.
  const auto opened = std::make_shared<OpenedPool>(impl_.get(), reply->pool);
  // A daemon that names no device has host memory alone.
  if (reply->device.empty()) reply->on_request = true;
  opened->device = reply->device.empty() ? kHostDevice : reply->device;
  if (reply->on_request) impl_->ring_device = opened->device;
  if (options.execution == Execution::kOnRequest && !reply->on_request)
    return Status(ErrorCode::kUnsupported,
                  "the pool is memory of " + opened->device +
                      ", and this client's calls on request go to the device of the first pool "
                      "that it opened: connect another client for this pool");
  if (reply->groups.size() != views->size())
    return Status(ErrorCode::kInternal, "the daemon answered with " +
                                            std::to_string(reply->groups.size()) + " groups, not " +
                                            std::to_string(views->size()));
  opened->unit_tokens = 1;
  for (uint32_t i = 0; i < reply->groups.size(); ++i) {
    if (Status status = check_layout(reply->groups[i]); !status.ok()) return status;
    opened->unit_tokens = std::lcm(opened->unit_tokens, int64_t{(*views)[i].geometry.block_tokens});
    opened->groups.push_back(
        std::make_unique<Pool::Impl>(*opened, reply->created, options.execution, i,
                                     std::move((*views)[i]), std::move(reply->groups[i])));
  }
  for (const auto& group : opened->groups)
    opened->per_unit.push_back(
        group->view.opaque
            ? 1
            : static_cast<size_t>(opened->unit_tokens / group->view.geometry.block_tokens));
  if (options.execution == Execution::kInProcess)
    if (Status status = impl_->take_in(*opened, options.stream); !status.ok()) return status;
  return Pool(std::shared_ptr<Pool::Impl>(opened, opened->groups[0].get()));
}

}  // namespace larder
