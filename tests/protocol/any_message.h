// Messages with every field filled, whatever the fields are, and their comparison.
//
// The fields are found by reflection, so that a field which is added to a struct and forgotten in
// the codec fails the round-trip test. Values are within the limits of limits.h; the numbers and
// lengths at their edges come up often.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <boost/pfr.hpp>

#include "protocol/executor_messages.h"
#include "protocol/limits.h"
#include "protocol/messages.h"
#include "protocol/notices.h"

namespace larder::test {

class Filler {
 public:
  explicit Filler(std::mt19937_64 engine) : engine_(std::move(engine)) {}

  void fill(bool& value) { value = below(2) == 0; }
  template <std::integral T>
  void fill(T& value) {
    using Limits = std::numeric_limits<T>;
    const std::array<T, 5> edges = {0, 1, static_cast<T>(-1), Limits::min(), Limits::max()};
    const uint64_t which = below(8);
    value = which < edges.size() ? edges[which] : static_cast<T>(engine_());
  }
  void fill(float& value) {
    const std::array<float, 4> edges = {0.0f, -0.0f, std::numeric_limits<float>::max(), 0.1f};
    value = edges[below(edges.size())];
  }
  void fill(double& value) {
    using Limits = std::numeric_limits<double>;
    const std::array<double, 6> edges = {
        0.0, -0.0, Limits::denorm_min(), Limits::max(), -Limits::infinity(), 0.1};
    value = edges[below(edges.size())];
  }
  void fill(std::string& value) {
    const std::string longest(max_text_bytes_, 'x');
    const std::array<const char*, 5> texts = {"", "a", "κρυφή-キャッシュ-🙂",
                                              "a \"name\" with \\ and %s", longest.c_str()};
    value = texts[below(texts.size())];
  }
  template <typename T, size_t N>
  void fill(std::array<T, N>& values) {
    for (T& value : values) fill(value);
  }
  template <typename T>
  void fill(std::vector<T>& values) {
    values.resize(std::array<size_t, 4>{0, 1, 2, 5}[below(4)]);
    for (T& value : values) fill(value);
  }
  template <typename A, typename B>
  void fill(std::pair<A, B>& value) {
    fill(value.first);
    fill(value.second);
  }
  template <typename... T>
  void fill(std::variant<T...>& value) {
    fill_alternative(value, below(sizeof...(T)));
  }
  template <size_t I = 0, typename... T>
  void fill_alternative(std::variant<T...>& value, uint64_t index) {
    if (index == I) return fill(value.template emplace<I>());
    if constexpr (I + 1 < sizeof...(T)) fill_alternative<I + 1>(value, index);
  }
  void fill(Status& value) {
    std::string message;
    fill(message);
    value = Status(static_cast<ErrorCode>(1 + below(kNumErrorCodes - 1)), message);
  }

  void fill(protocol::Connect& value) {
    fill_fields(value);
    value.arena_bytes =
        std::array<uint64_t, 3>{0, protocol::kMinArenaBytes, protocol::kMaxArenaBytes}[below(3)];
  }
  void fill(protocol::AddSession& value) {
    fill_fields(value);
    value.arena_bytes = protocol::kMinArenaBytes;
  }
  void fill(protocol::OpenSegments& value) {
    fill_fields(value);
    value.count = static_cast<uint32_t>(below(protocol::kMaxFdsPerMessage + 1));
  }
  void fill(protocol::Allocate& value) {
    fill_fields(value);
    value.num_blocks = static_cast<int64_t>(below(protocol::kMaxBlocksPerMessage + 1));
    value.total_blocks &= std::numeric_limits<int64_t>::max();
  }
  void fill(protocol::ArenaRange& value) {
    fill_fields(value);
    value.count = below(protocol::kMaxTokensInArena + 1);
  }
  void fill(protocol::Publish& value) {
    fill_fields(value);
    value.first_block = static_cast<int64_t>(below(protocol::kMaxTokensInArena + 1));
  }
  void fill(protocol::Lookup& value) {
    fill_fields(value);
    value.first_block = static_cast<int64_t>(below(protocol::kMaxTokensInArena + 1));
  }
  void fill(protocol::Copy& value) {
    fill_fields(value);
    value.to.resize(value.from.size());
  }
  void fill(protocol::CopyBlocks& value) {
    fill_fields(value);
    value.to.resize(value.from.size());
  }
  void fill(protocol::ResizePool& value) {
    fill_fields(value);
    value.num_blocks &= std::numeric_limits<int64_t>::max();
  }
  void fill(protocol::Evict& value) {
    fill_fields(value);
    value.num_blocks &= std::numeric_limits<int64_t>::max();
  }
  void fill(protocol::SetQuota& value) {
    fill_fields(value);
    value.guaranteed_bytes &= std::numeric_limits<int64_t>::max();
    value.maximum_bytes &= std::numeric_limits<int64_t>::max();
  }
  void fill(protocol::Unmap& value) { fill_segment(value); }
  void fill(protocol::NoticeAck& value) { fill_segment(value); }
  void fill(protocol::RegisterImport& value) {
    fill_fields(value);
    value.size_bytes = 1 + value.size_bytes % protocol::kMaxImportBytes;
    value.offset_bytes %= protocol::kMaxImportBytes;
    value.handle = std::string(value.handle.size() % 2 * protocol::kIpcHandleBytes, 'h');
  }
  void fill(protocol::Request& value) {
    fill_fields(value);
    value.deadline_us = below(protocol::kMaxDeadlineUs + 1);
    value.answered_below %=
        value.id == std::numeric_limits<uint64_t>::max() ? value.id : value.id + 1;
  }
  void fill(protocol::SessionInfo& value) {
    fill_fields(value);
    value.fence = value.fence.substr(0, value.fence.size() > 60 ? 32 : 0);
  }
  void fill(protocol::Capability& value) {
    max_text_bytes_ = protocol::kMaxCapabilityTextBytes;
    fill_fields(value);
    max_text_bytes_ = protocol::kMaxNameBytes;
  }
  template <typename T>
  requires std::is_aggregate_v<T>
  void fill(T& value) { fill_fields(value); }

  // Another value of `body`'s variant, of the given alternative.
  // Not inlined: GCC 12 would warn about the vectors inside (-Wfree-nonheap-object), wrongly.
  template <typename Message>
  [[gnu::noinline]] Message message(uint64_t alternative) {
    Message result;
    fill(result);
    if constexpr (requires { result.body; })
      fill_alternative(result.body, alternative);
    else
      fill_alternative(result, alternative);
    return result;
  }

  uint64_t below(uint64_t limit) {
    return std::uniform_int_distribution<uint64_t>(0, limit - 1)(engine_);
  }

 private:
  template <typename T>
  void fill_fields(T& value) {
    boost::pfr::for_each_field(value, [this](auto& field) { fill(field); });
  }

  template <typename T>
  void fill_segment(T& value) {
    fill_fields(value);
    value.group = static_cast<uint32_t>(below(protocol::kMaxGroups));
    value.index = static_cast<uint32_t>(below(protocol::kMaxSegmentsPerGroup));
  }

  std::mt19937_64 engine_;
  size_t max_text_bytes_ = protocol::kMaxNameBytes;
};

inline bool same(const Status& a, const Status& b) {
  return a.code() == b.code() && a.message() == b.message();
}
inline bool same(const double& a, const double& b) {  // bit by bit: -0.0 and NaN too
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}
template <typename T>
bool same(const T& a, const T& b);
template <typename T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const T& x, const T& y) { return same(x, y); });
}
template <typename... T>
bool same(const std::variant<T...>& a, const std::variant<T...>& b) {
  return std::visit(
      [](const auto& x, const auto& y) {
        if constexpr (std::is_same_v<decltype(x), decltype(y)>)
          return same(x, y);
        else
          return false;
      },
      a, b);
}
template <typename T>
bool same(const T& a, const T& b) {
  if constexpr (std::equality_comparable<T>) {
    return a == b;
  } else {
    bool result = true;
    boost::pfr::for_each_field(a, [&](const auto& x, auto index) {
      result = result && same(x, boost::pfr::get<decltype(index)::value>(b));
    });
    return result;
  }
}

}  // namespace larder::test
