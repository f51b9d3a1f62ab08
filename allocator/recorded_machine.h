// The state machine with its journal: nothing that it decides is acted on before it is kept.
//
// The order is: a segment is made and deposited, then its creation is decided and recorded, then
// the replies that rely on it go out; and no effect is carried out before its record is in the
// journal. Whoever is killed at any point finds in the journal everything that anybody was told.
// Knows neither sockets nor processes: they are Outside. Thread rule: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "allocator/journal.h"
#include "allocator/state_machine.h"

namespace larder {

class Outside {
 public:
  virtual ~Outside() = default;
  virtual int64_t now_us() = 0;
  // Makes the memory and deposits it; ok only when it outlives this process from now on.
  virtual Status create_segment(const CreateSegment& effect) = 0;
  virtual void drop_segment(SegmentId segment) = 0;
  // Keeps a record; false when there is no room for it, and then nothing is kept.
  virtual bool append(std::span<const std::byte> record) = 0;
  // Puts a journal that begins with this state in place of the one there is, in one step.
  virtual void checkpoint(std::span<const std::byte> snapshot) = 0;
  // Every other effect, in order. It may apply events; they are applied after the one at hand.
  virtual void carry_out(Effect effect) = 0;
};

class RecordedMachine {
 public:
  // `outside` must outlive the machine.
  explicit RecordedMachine(Outside& outside) : outside_(outside) {}

  // Before anything is applied: the state that a journal says. INTERNAL or UNSUPPORTED names the
  // record that does not fit; the machine is of no use then.
  Status recover(const JournalContents& journal);
  void apply(Event event);
  const StateMachine& machine() const { return machine_; }
  // The state as a checkpoint begins with it.
  std::span<const std::byte> snapshot();

 private:
  void apply_next();

  Outside& outside_;
  StateMachine machine_;
  std::deque<Event> events_;  // to be applied, in order
  bool applying_ = false;
  ByteWriter snapshot_;
};

}  // namespace larder
