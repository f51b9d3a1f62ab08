#include "tests/simulation/coverage.h"

#include <algorithm>
#include <cstdio>
#include <initializer_list>

namespace larder::sim {

std::string_view activity_name(size_t activity) {
  constexpr std::string_view kNames[kNumActivities] = {
      "Configure",     "Recovered",   "OpenSession",    "ResumeSession", "CloseSession",
      "SessionFenced", "OpenPool",    "SegmentCreated", "MapExtents",    "SegmentUnmapped",
      "ResizePool",    "EvictBlocks", "SetQuota",       "CancelRequest", "ClosePool",
      "DestroyPool",   "Allocate",    "Release",        "Publish",       "Lookup",
      "Copy",          "CopyDone",    "(starting)",     "(redepositing)"};
  return kNames[activity];
}

std::string_view effect_name(size_t effect) {
  constexpr std::string_view kNames[kNumEffectKinds] = {
      "Reply",   "CreateSegment", "DropSegment", "PoolCreated",   "PoolDestroyed", "SetOwnerWord",
      "RunCopy", "FenceSession",  "ExtentAdded", "ExtentRemoved", "UnmapSegment"};
  return kNames[effect];
}

std::string_view crash_point_name(CrashPoint point) {
  constexpr std::string_view kNames[kNumCrashPoints] = {
      "apply<",   "record<", "record~", "record>",  "effect<",  "effects>", "deposit<",
      "deposit>", "drop<",   "drop>",   "checkpt<", "checkpt>", "inflight", "step"};
  return kNames[static_cast<size_t>(point)];
}

bool can_be_killed_at(size_t activity, CrashPoint point) {
  const auto is = [&](std::initializer_list<std::string_view> names) {
    return std::ranges::find(names, activity_name(activity)) != names.end();
  };
  if (point == CrashPoint::kStep) return activity >= kNumEventKinds;
  if (activity >= kNumEventKinds) return false;
  switch (point) {
    case CrashPoint::kBeforeEffect:
      return !is({"Configure", "OpenSession", "ResumeSession", "CancelRequest"});
    case CrashPoint::kAfterEffects:
      return !is({"SegmentCreated"});  // the event that brought it about is at its end
    case CrashPoint::kBeforeDeposit:
    case CrashPoint::kAfterDeposit:
      return is({"OpenPool", "ResizePool", "Allocate", "SegmentUnmapped"});
    case CrashPoint::kBeforeDrop:
    case CrashPoint::kAfterDrop:
      return is({"ResizePool", "Allocate", "SegmentUnmapped", "DestroyPool", "SessionFenced"});
    default:
      return true;
  }
}

std::string_view fault_name(Fault fault) {
  constexpr std::string_view kNames[kNumFaults] = {
      "larderd killed",         "keeper killed",        "keeper and larderd killed",
      "executor killed",        "client killed",        "client killed, its child lives on",
      "client never returns",   "client stops reading", "client stops unmapping",
      "segment refused",        "copy fails",           "copy is done twice",
      "dead larderd's message", "clock jumps back",     "clock jumps forward",
      "damaged journal",        "second larderd"};
  return kNames[static_cast<size_t>(fault)];
}

uint64_t Coverage::crashes_at(CrashPoint point) const {
  uint64_t sum = 0;
  for (const auto& row : crashes) sum += row[static_cast<size_t>(point)];
  return sum;
}

std::string Coverage::table() const {
  std::string text;
  char cell[64];
  const auto put = [&](const char* format, auto... values) {
    std::snprintf(cell, sizeof cell, format, values...);
    text += cell;
  };
  put("%-16s %9s", "event", "times");
  for (size_t i = 0; i < kNumCrashPoints; ++i)
    put(" %8s", crash_point_name(static_cast<CrashPoint>(i)).data());
  text += '\n';
  for (size_t kind = 0; kind < kNumActivities; ++kind) {
    put("%-16s %9llu", activity_name(kind).data(),
        static_cast<unsigned long long>(activities[kind]));
    for (const uint64_t times : crashes[kind])
      put(" %8llu", static_cast<unsigned long long>(times));
    text += '\n';
  }
  const auto list = [&](const char* title, const auto& counts, auto name) {
    text += title;
    for (size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] == 0) continue;
      text += ' ';
      text += name(i);
      text += ' ' + std::to_string(counts[i]) + ';';
    }
    text += '\n';
  };
  list("effects:", effects, effect_name);
  list("refusals:", refusals, [](size_t i) { return error_code_name(static_cast<ErrorCode>(i)); });
  list("faults:", faults, [](size_t i) { return fault_name(static_cast<Fault>(i)); });
  text += "recoveries " + std::to_string(recoveries) + ", sessions resumed " +
          std::to_string(resumed_sessions) + ", blocks whose content was compared " +
          std::to_string(checked_hits) + ", sessions compared hold by hold " +
          std::to_string(checked_sessions) + '\n';
  return text;
}

}  // namespace larder::sim
