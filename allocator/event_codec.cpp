#include "allocator/event_codec.h"

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace larder {
namespace {

// What of each struct is kept, in order: one list for both directions.
template <typename T, typename... Others>
concept OneOf = (std::is_same_v<std::remove_const_t<T>, Others> || ...);

auto fields(OneOf<TenantSpec> auto& e) {
  return std::tie(e.name, e.salt, e.guaranteed_bytes, e.maximum_bytes);
}
auto fields(OneOf<Configure> auto& e) {
  return std::tie(e.memory_bytes, e.max_pools, e.tenants, e.cache_id);
}
auto fields(OneOf<Recovered> auto&) { return std::tuple<>(); }
auto fields(OneOf<OpenSession> auto& e) {
  return std::tie(e.session, e.tenant, e.role, e.attachment);
}
auto fields(OneOf<ResumeSession, SessionFenced> auto& e) { return std::tie(e.session); }
auto fields(OneOf<CloseSession> auto& e) { return std::tie(e.session, e.fence); }
auto fields(OneOf<GroupSpec> auto& e) {
  return std::tie(e.name, e.block_bytes, e.num_blocks, e.block_tokens, e.one_segment,
                  e.reserve_block_zero, e.max_blocks, e.segment_bytes, e.kind, e.window_tokens);
}
auto fields(OneOf<PoolSpec> auto& e) { return std::tie(e.name, e.model, e.identity, e.groups); }
auto fields(OneOf<OpenPool> auto& e) {
  return std::tie(e.request, e.session, e.spec, e.attachment, e.answered_below);
}
auto fields(OneOf<SegmentCreated> auto& e) { return std::tie(e.segment, e.status); }
auto fields(OneOf<MapExtents> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.group, e.first, e.count, e.answered_below);
}
auto fields(OneOf<SegmentUnmapped> auto& e) { return std::tie(e.segment, e.session); }
auto fields(OneOf<ResizePool> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.group, e.num_blocks, e.answered_below,
                  e.blocks_before, e.bytes_before);
}
auto fields(OneOf<EvictBlocks> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.num_blocks, e.answered_below);
}
auto fields(OneOf<SetQuota> auto& e) {
  return std::tie(e.request, e.session, e.tenant, e.guaranteed_bytes, e.maximum_bytes,
                  e.answered_below);
}
auto fields(OneOf<CancelRequest> auto& e) { return std::tie(e.session, e.number); }
auto fields(OneOf<ClosePool, DestroyPool> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.answered_below);
}
auto fields(OneOf<Allocate> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.group, e.num_blocks, e.total_blocks,
                  e.answered_below);
}
auto fields(OneOf<Release> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.group, e.blocks, e.answered_below);
}
auto fields(OneOf<Publish> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.blocks, e.first_block, e.answered_below, e.keys,
                  e.parent);
}
auto fields(OneOf<Lookup> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.hold, e.first_block, e.answered_below, e.keys);
}
auto fields(OneOf<Copy> auto& e) {
  return std::tie(e.request, e.session, e.pool, e.group, e.from, e.to, e.answered_below);
}
auto fields(OneOf<CopyDone> auto& e) { return std::tie(e.copy, e.status); }

auto fields(OneOf<GroupLayout> auto& e) {
  return std::tie(e.block_bytes, e.block_stride_bytes, e.num_blocks, e.extent_bytes,
                  e.segment_bytes, e.blocks_per_extent, e.first_extents);
}
auto fields(OneOf<Done> auto&) { return std::tuple<>(); }
auto fields(OneOf<PoolOpened> auto& e) { return std::tie(e.pool, e.created, e.groups); }
auto fields(OneOf<BlocksAllocated> auto& e) { return std::tie(e.blocks); }
auto fields(OneOf<BlocksPublished> auto& e) { return std::tie(e.keys, e.blocks); }
auto fields(OneOf<PrefixFound> auto& e) { return std::tie(e.hit_tokens, e.blocks); }
auto fields(OneOf<ExtentsMapped> auto& e) { return std::tie(e.segments); }
auto fields(OneOf<Resized> auto& e) {
  return std::tie(e.blocks_before, e.blocks_after, e.bytes_before, e.bytes_after);
}

template <typename T>
constexpr bool kIsNumber = std::is_arithmetic_v<T> || std::is_enum_v<T>;

// Elements that are written as they lie in memory.
template <typename T>
constexpr bool kIsFlat = std::is_integral_v<T> || std::is_enum_v<T> ||
                         std::is_same_v<T, BlockRef> || std::is_same_v<T, BlockKey>;

struct Saver {
  ByteWriter& out;

  template <typename T>
  void put(const T& value) {
    if constexpr (kIsNumber<T>) {
      out.put(value);
    } else {
      std::apply([&](const auto&... field) { (put(field), ...); }, fields(value));
    }
  }
  void put(const std::string& text) { out.put_text(text); }
  void put(const Status& status) {
    out.put(status.code());
    out.put_text(status.message());
  }
  void put(const std::pair<std::string, std::string>& pair) {
    put(pair.first);
    put(pair.second);
  }
  template <typename T>
  void put(const std::vector<T>& values) {
    if constexpr (kIsFlat<T>) {
      out.put_list(values);
    } else {
      out.put(static_cast<uint32_t>(values.size()));
      for (const T& value : values) put(value);
    }
  }
};

struct Loader {
  ByteReader& in;

  template <typename T>
  void get(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      value = in.get_bool();
    } else if constexpr (std::is_same_v<T, Role>) {
      value = in.get_up_to(Role::kAdmin);
    } else if constexpr (std::is_same_v<T, FenceClass>) {
      value = in.get_up_to(FenceClass::kUnprovable);
    } else if constexpr (std::is_same_v<T, GroupKind>) {
      value = in.get_up_to(GroupKind::kState);
    } else if constexpr (kIsNumber<T>) {
      value = in.get<T>();
    } else {
      std::apply([&](auto&... field) { (get(field), ...); }, fields(value));
    }
  }
  void get(std::string& text) { text = in.get_text(); }
  void get(Status& status) {
    const auto code = in.get_up_to(static_cast<ErrorCode>(kNumErrorCodes - 1));
    std::string message = in.get_text();
    status = code == ErrorCode::kOk ? Status() : Status(code, std::move(message));
  }
  void get(std::pair<std::string, std::string>& pair) {
    get(pair.first);
    get(pair.second);
  }
  template <typename T>
  void get(std::vector<T>& values) {
    if constexpr (kIsFlat<T>) {
      values = in.get_list<T>();
    } else {
      const size_t count = in.count_of(1);
      for (size_t i = 0; i < count && !in.failed(); ++i) get(values.emplace_back());
    }
  }
};

// The alternative's number, then its fields.
template <typename Variant>
void put_variant(ByteWriter& out, const Variant& variant) {
  out.put(static_cast<uint8_t>(variant.index()));
  std::visit([&](const auto& value) { Saver{out}.put(value); }, variant);
}

template <typename Variant, size_t... kIndices>
Variant get_variant(ByteReader& in, std::index_sequence<kIndices...>) {
  const auto index = in.get_up_to(static_cast<uint8_t>(sizeof...(kIndices) - 1));
  Variant variant;
  const auto load = [&]<size_t kIndex>() {
    if (index != kIndex) return;
    std::variant_alternative_t<kIndex, Variant> value{};
    Loader{in}.get(value);
    variant.template emplace<kIndex>(std::move(value));
  };
  (load.template operator()<kIndices>(), ...);
  return variant;
}

template <typename Variant>
Variant get_variant(ByteReader& in) {
  return get_variant<Variant>(in, std::make_index_sequence<std::variant_size_v<Variant>>());
}

}  // namespace

void put_event(ByteWriter& out, const Event& event) { put_variant(out, event); }
Event get_event(ByteReader& in) { return get_variant<Event>(in); }
void put_reply(ByteWriter& out, const ReplyBody& reply) { put_variant(out, reply); }
ReplyBody get_reply(ByteReader& in) { return get_variant<ReplyBody>(in); }
void put_pool_spec(ByteWriter& out, const PoolSpec& spec) { Saver{out}.put(spec); }
PoolSpec get_pool_spec(ByteReader& in) {
  PoolSpec spec;
  Loader{in}.get(spec);
  return spec;
}

void put_record(ByteWriter& out, const Event& event, int64_t now_us,
                const std::vector<int64_t>& choices) {
  out.put(now_us);
  out.put_list(choices);
  put_event(out, event);
}

Record get_record(ByteReader& in) {
  Record record;
  record.now_us = in.get<int64_t>();
  record.choices = in.get_list<int64_t>();
  record.event = get_event(in);
  return record;
}

}  // namespace larder
