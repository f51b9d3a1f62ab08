#include "allocator/recorded_machine.h"

#include <string>
#include <utility>

namespace larder {

Status RecordedMachine::recover(const JournalContents& journal) {
  if (Status status = machine_.load(journal.snapshot); !status.ok()) return status;
  uint64_t sequence = journal.snapshot_sequence;
  for (const std::span<const std::byte> record : journal.records) {
    ++sequence;
    if (Status status = machine_.replay(record); !status.ok())
      return {status.code(), "record " + std::to_string(sequence) + ": " + status.message()};
  }
  return {};
}

void RecordedMachine::apply(Event event) {
  events_.push_back(std::move(event));
  if (applying_) return;
  applying_ = true;
  while (!events_.empty()) apply_next();
  applying_ = false;
}

void RecordedMachine::apply_next() {
  Event event = std::move(events_.front());
  events_.pop_front();
  Effects effects = machine_.apply(std::move(event), outside_.now_us());
  if (const auto record = machine_.record(); !record.empty() && !outside_.append(record))
    outside_.checkpoint(snapshot());
  for (Effect& effect : effects) {
    if (const auto* create = std::get_if<CreateSegment>(&effect)) {
      Status status = outside_.create_segment(*create);
      events_.emplace_back(SegmentCreated{create->segment, std::move(status)});
    } else if (const auto* drop = std::get_if<DropSegment>(&effect)) {
      outside_.drop_segment(drop->segment);
    } else {
      outside_.carry_out(std::move(effect));
    }
  }
}

std::span<const std::byte> RecordedMachine::snapshot() {
  snapshot_.clear();
  machine_.save(snapshot_);
  return snapshot_.bytes();
}

}  // namespace larder
