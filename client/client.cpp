#include <algorithm>

#include "client/client_impl.h"
#include "protocol/limits.h"

namespace larder {
namespace {

constexpr auto kGoodbyeDeadline = std::chrono::seconds(1);

protocol::AttentionGroup attention_group(const PoolOptions& options) {
  const AttentionGeometry& geometry = options.geometry;
  protocol::AttentionGroup group;
  group.num_layers = geometry.num_layers;
  group.num_kv_heads = geometry.num_kv_heads;
  group.k_dim = geometry.k_dim;
  group.v_dim = geometry.v_dim;
  group.k_format = name(geometry.k_format);
  group.v_format = name(geometry.v_format);
  group.encoder = name(options.encoder);
  group.key_transform = name(options.key_transform);
  group.key_offsets = options.key_offsets;
  group.k_scales = options.k_scales;
  group.v_scales = options.v_scales;
  group.window_tokens = options.window_tokens;
  return group;
}

protocol::PoolSpec to_wire(const PoolOptions& options) {
  protocol::GroupSpec group;
  group.block_tokens = options.geometry.block_tokens;
  group.num_blocks = options.num_blocks;
  group.max_blocks = options.max_blocks;
  group.layout = name(options.layout);
  group.reserve_block_zero = options.reserve_block_zero;
  if (options.opaque_block_bytes != 0) {
    group.name = "opaque";
    group.kind = protocol::OpaqueGroup{options.opaque_block_bytes};
  } else if (options.geometry.mla_row != MlaRow::kNone) {
    group.name = "mla";
    group.kind = protocol::MlaGroup{options.geometry.num_layers,
                                    std::string(name(options.geometry.mla_row)), options.k_scales};
  } else {
    group.name = "attention";
    group.kind = attention_group(options);
  }
  return {options.name, options.model, {std::move(group)}};
}

// What the kind of pool has no use for must not be stated: it would be ignored in silence.
Status check_kind(const PoolOptions& options) {
  const bool opaque = options.opaque_block_bytes != 0;
  const bool mla = options.geometry.mla_row != MlaRow::kNone;
  if (!opaque && !mla) return {};
  if (options.encoder == Encoder::kReference && options.key_transform == KeyTransform::kNone &&
      options.key_offsets.empty() && options.v_scales.empty() &&
      (mla ? !opaque : options.k_scales.empty()))
    return {};
  return {ErrorCode::kInvalidArgument,
          std::string("encoder, key_transform, key_offsets, v_scales") +
              (opaque ? ", k_scales and mla_row" : "") + " must keep their defaults in " +
              (opaque ? "an opaque" : "an MLA") + " pool"};
}

Status check_deadline(std::chrono::microseconds deadline) {
  const auto longest = std::chrono::microseconds(protocol::kMaxDeadlineUs);
  if (deadline.count() > 0 && deadline <= longest) return {};
  return {ErrorCode::kInvalidArgument, "deadline is " + std::to_string(deadline.count()) +
                                           " us, 1 to " + std::to_string(longest.count()) +
                                           " are allowed"};
}

}  // namespace

protocol::Block to_wire(const BlockHandle& block) { return {block.id, block.generation}; }

std::vector<protocol::Block> to_wire(std::span<const BlockHandle> blocks) {
  std::vector<protocol::Block> result;
  result.reserve(blocks.size());
  for (const BlockHandle& block : blocks) result.push_back(to_wire(block));
  return result;
}

std::vector<BlockHandle> from_wire(const std::vector<protocol::Block>& blocks) {
  std::vector<BlockHandle> result;
  result.reserve(blocks.size());
  for (const protocol::Block& block : blocks) result.push_back({block.id, block.generation});
  return result;
}

Result<protocol::TokenList> Client::Impl::token_list(std::span<const int32_t> tokens) {
  // Well below the message's size, so that block lists have room beside the tokens.
  constexpr size_t kInlineTokens = 4096;
  if (tokens.size() <= kInlineTokens || !ring)
    return protocol::TokenList(std::vector<int32_t>(tokens.begin(), tokens.end()));
  if (Status status = ring->start(deadline()); !status.ok()) return status;
  auto array = ring->stage(tokens.data(), tokens.size());
  if (!array) return array.status();
  return protocol::TokenList(protocol::ArenaRange{array->offset_bytes, array->count});
}

Status Client::Impl::stage_key_offsets(protocol::GroupSpec& group) {
  auto* attention = std::get_if<protocol::AttentionGroup>(&group.kind);
  if (attention == nullptr) return {};
  const auto& offsets = std::get<std::vector<float>>(attention->key_offsets);
  if (offsets.size() <= protocol::kMaxFloatsInline) return {};
  if (!ring)
    return {ErrorCode::kInvalidArgument, "key_offsets has " + std::to_string(offsets.size()) +
                                             " entries: more than " +
                                             std::to_string(protocol::kMaxFloatsInline) +
                                             " travel through the arena, and arena_bytes is 0"};
  if (Status status = ring->start(deadline()); !status.ok()) return status;
  auto array = ring->stage(offsets.data(), offsets.size());
  if (!array) return array.status();
  attention->key_offsets = protocol::ArenaRange{array->offset_bytes, array->count};
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
  auto control = ControlConnection::connect(options.socket_path, hello, options.deadline);
  if (!control) return control.status();
  auto impl = std::make_unique<Impl>(Impl{std::move(options), std::move(*control), std::nullopt});
  if (hello.arena_bytes > 0) {
    auto ring = RequestRing::open(impl->control.take_fds(), impl->control.session().arena_bytes);
    if (!ring) return ring.status();
    impl->ring.emplace(std::move(*ring));
  }
  return Client(std::move(impl));
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&& other) noexcept {
  Client old(std::move(impl_));  // says goodbye
  impl_ = std::move(other.impl_);
  return *this;
}

Client::~Client() {
  if (impl_ == nullptr) return;
  // Best effort: without it the daemon waits for the process to end before it trusts the blocks.
  impl_->control.set_deadline(kGoodbyeDeadline);
  try {
    (void)impl_->control.call(protocol::Goodbye{});
  } catch (...) {  // a destructor does not throw; the closed socket says the same, later
  }
}

uint64_t Client::session_id() const { return impl_->control.session().session; }
uint64_t Client::boot_id() const { return impl_->control.boot_id(); }

Result<Pool> Client::open_pool(const PoolOptions& options) {
  if (options.execution == Execution::kOnRequest && !impl_->ring)
    return Status(ErrorCode::kInvalidArgument,
                  "execution on request needs an arena, and arena_bytes is 0");
  if (Status status = check_kind(options); !status.ok()) return status;
  protocol::PoolSpec spec = to_wire(options);
  Result<GroupView> view = view_group(spec.groups[0]);
  if (!view) return view.status();
  if (Status status = impl_->stage_key_offsets(spec.groups[0]); !status.ok()) return status;
  auto opened = impl_->control.call_for<protocol::PoolOpened>(protocol::OpenPool{spec});
  if (!opened) return opened.status();
  if (opened->groups.size() != 1)
    return Status(ErrorCode::kInternal,
                  "the daemon answered with " + std::to_string(opened->groups.size()) + " groups");
  ++impl_->num_open[opened->pool];
  // From here on a refusal closes the pool again.
  Pool pool(std::make_unique<Pool::Impl>(Pool::Impl{impl_.get(), opened->pool, opened->created,
                                                    options.execution, std::move(*view),
                                                    std::move(opened->groups[0]), MappedRange()}));
  if (options.execution == Execution::kInProcess) {
    if (Status status = pool.impl_->map_memory(); !status.ok()) return status;
  }
  return pool;
}

}  // namespace larder
