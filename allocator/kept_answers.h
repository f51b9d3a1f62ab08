// The answers of one session that it has not said to have: a request that comes again is answered
// from here and not carried out again.
//
// They are bounded: a client that never says what has arrived cannot come back after a restart with
// a request whose answer was lost. Deterministic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "allocator/effects.h"

namespace larder {

class KeptAnswers {
 public:
  static constexpr size_t kMaxAnswers = 64;
  static constexpr size_t kMaxItems = 16384;  // of all answers together; the last is always kept

  const std::deque<std::pair<uint64_t, ReplyBody>>& all() const { return answers_; }

  const ReplyBody* find(uint64_t request) const {
    for (const auto& [number, body] : answers_)
      if (number == request) return &body;
    return nullptr;
  }
  void forget_below(uint64_t request) {
    std::erase_if(answers_, [&](const auto& answer) {
      if (answer.first >= request) return false;
      num_items_ -= items_in(answer.second);
      return true;
    });
  }
  void keep(uint64_t request, ReplyBody body) {
    num_items_ += items_in(body);
    answers_.emplace_back(request, std::move(body));
    while (answers_.size() > 1 && (answers_.size() > kMaxAnswers || num_items_ > kMaxItems)) {
      num_items_ -= items_in(answers_.front().second);
      answers_.pop_front();
    }
  }

 private:
  // Blocks or segments: what an answer's size depends on.
  static size_t items_in(const ReplyBody& body) {
    if (const auto* allocated = std::get_if<BlocksAllocated>(&body))
      return allocated->blocks.size();
    if (const auto* published = std::get_if<BlocksPublished>(&body))
      return published->blocks.size();
    if (const auto* found = std::get_if<PrefixFound>(&body)) return found->blocks.size();
    if (const auto* mapped = std::get_if<ExtentsMapped>(&body)) return mapped->segments.size();
    size_t segments = 0;
    if (const auto* opened = std::get_if<PoolOpened>(&body))
      for (const GroupLayout& group : opened->groups) segments += group.segment_bytes.size();
    return segments;
  }

  std::deque<std::pair<uint64_t, ReplyBody>> answers_;  // in their order
  size_t num_items_ = 0;
};

}  // namespace larder
