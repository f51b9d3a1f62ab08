// Choices: what the state machine decides by policy, so that a replay decides the same.
//
// Which block is handed out, which prefix is evicted, which extent is given back are matters of
// policy, and another build may have another one. The journal therefore keeps, beside each event,
// the choices made for it; a replay takes these and decides nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace larder {

// A record of the journal does not fit to the state that it is applied to.
class ReplayError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Choices {
 public:
  template <typename Decide>
  int64_t choose(Decide decide) {
    if (!replaying_) {
      made_.push_back(decide());
      return made_.back();
    }
    if (next_ == made_.size()) throw ReplayError("a choice is missing");
    return made_[next_++];
  }

  bool replaying() const { return replaying_; }
  const std::vector<int64_t>& made() const { return made_; }

  void start_live() {
    made_.clear();
    replaying_ = false;
  }
  void start_replay(std::vector<int64_t> choices) {
    made_ = std::move(choices);
    next_ = 0;
    replaying_ = true;
  }
  void end_replay() {
    if (std::exchange(replaying_, false) && next_ != made_.size())
      throw ReplayError("choices are left over");
  }

 private:
  std::vector<int64_t> made_;
  size_t next_ = 0;
  bool replaying_ = false;
};

}  // namespace larder
