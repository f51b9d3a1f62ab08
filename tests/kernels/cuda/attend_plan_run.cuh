// A random call of tuned decode attention, followed on the host: every CTA plans with the kernel's
// own code, as threads that take turns, and then its warps, loads and ends go their way as the
// kernel has them go, but for the arithmetic. Included after cuda_threads.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/attend_decode_ends.cuh"
#include "tests/kernels/cuda/attend_plan_call.cuh"
#include "tests/kernels/cuda/attend_plan_model.h"

namespace larder::test {

// What a step loads: tiles [tile, tile + count) of a segment.
struct Load {
  int64_t segment;
  int32_t tile;
  int32_t count;
};

// A call, from its plan to its results.
template <int kColumns, int kStepTiles>
class PlanRun {
 public:
  PlanRun(const PlanCase& one, const PlanModel& model)
      : one_(one), model_(model), call_(call_of(one, faults_)), ledger_(one, model) {}

  // Of the lowest numbers, so many have got work.
  int working_ctas() const { return working_ctas_; }

  // Returns how many slots CTAs have written for others.
  int64_t run() {
    int64_t num_units = 0;
    for (cta_ = 0; cta_ < one_.grid; ++cta_) {
      plan();
      expect(plan_.total == model_.num_units, "CTA", cta_, "counts", plan_.total, "units, not",
             model_.num_units);
      if (plan_.count == 0) continue;
      expect(plan_.begin == num_units, "CTA", cta_, "begins at unit", plan_.begin, "after",
             num_units);
      num_units += plan_.count;
      working_ctas_ = cta_ + 1;
      if (is_pieces())
        take_pieces();
      else
        take_even_stretch();
    }
    expect(num_units == model_.num_units, "taken are", num_units, "units of", model_.num_units);
    ledger_.check_complete();
    expect(faults_.count == model_.reports.size(), "reports:", faults_.count, "not",
           model_.reports.size());
    expect(faults_.count == 0 ||
               std::count(model_.reports.begin(), model_.reports.end(), faults_.first_value) > 0,
           "a report of", faults_.first_value, "which is not wrong");
    return ledger_.num_slots();
  }

 private:
  bool is_pieces() const { return one_.piece_tiles > 0; }
  void be(int thread) { be_thread({one_.grid, cta_, 32 * one_.warps, thread}); }

  // By all threads. Shared memory holds anything before, and so do places past the last unit.
  void plan() {
    std::memset(&shared_, 0xEE, sizeof shared_);
    std::memset(places_.data(), 0xEE, sizeof places_);
    run_cta({one_.grid, cta_, 32 * one_.warps, 0}, [&] {
      plans_[threadIdx.x] =
          cuda::plan_cta<kColumns, kStepTiles>(call_, shared_, places_[threadIdx.x]);
    });
    plan_ = plans_[0];
    for (size_t i = 1; i < 32 * static_cast<size_t>(one_.warps); ++i)
      expect(plans_[i].total == plan_.total && plans_[i].begin == plan_.begin &&
                 plans_[i].count == plan_.count && plans_[i].num_warps == plan_.num_warps,
             "thread", i, "of CTA", cta_, "has another plan than thread 0");
  }

  // The walk's segment, of which the plan must be right.
  int64_t segment_of(const cuda::Walk& walk) const {
    const int64_t index = model_.find(walk.sequence, walk.head, walk.column_tile);
    const PlanSegment& segment = model_.segments[static_cast<size_t>(index)];
    const bool is_right = walk.first_row == segment.first_row && walk.plan.rows == segment.rows &&
                          walk.plan.begin == segment.first_tile && walk.plan.tiles == segment.tiles;
    expect(is_right, "sequence", walk.sequence, "has (first row, rows, first tile, tiles)",
           walk.first_row, walk.plan.rows, walk.plan.begin, walk.plan.tiles, "not",
           segment.first_row, segment.rows, segment.first_tile, segment.tiles);
    return index;
  }

  // ------------------------------------------------------------------- a warp's stretch

  // As the ring goes ahead of the products. Of long stretches all that is loaded of a segment.
  std::optional<Load> next_load(cuda::LoadPlace& place, bool is_long) {
    if (tile_ >= place.end) return std::nullopt;
    const Load load = {segment_of(place.walk), tile_,
                       is_long ? place.end - tile_ : std::min(place.end - tile_, kStepTiles)};
    expect(place.table == call_.block_table + place.walk.sequence * call_.block_table_stride &&
               place.data == kKeysAt + static_cast<uint64_t>(place.walk.head) * kHeadBytes &&
               place.scales == kScalesAt + static_cast<uint64_t>(place.walk.head) * kHeadScaleBytes,
           "loads of sequence", place.walk.sequence, "go to another's table or another head");
    tile_ += is_long ? load.count : kStepTiles;
    if (tile_ >= place.end && place.left > 0) {
      cuda::enter_next<kColumns>(call_, place);
      tile_ = place.tile;
    }
    return load;
  }

  void take_stretch(int warp) {
    constexpr int32_t kLongTiles = 3000;
    be(32 * warp);
    cuda::WarpPlaces& places = warps_[static_cast<size_t>(warp)];
    const bool is_long = places.left > kLongTiles;
    cuda::enter_first<kColumns>(call_, kStepTiles, places);
    tile_ = places.loads.tile;
    while (true) {
      take_piece(places, is_long);
      const int32_t left = end_piece(warp, places);
      if (left == 0) break;
      cuda::go_on_after<kColumns>(call_, left, places);
      expect(places.left > 0, "nothing is left of the stretch of warp", warp);
    }
    expect(!next_load(places.loads, is_long), "a load too many by warp", warp, "of CTA", cta_);
  }

  // What is seen of the piece is loaded in that order, and holds what its rows see.
  void take_piece(cuda::WarpPlaces& places, bool is_long) {
    const cuda::Walk& walk = places.products;
    const int64_t index = segment_of(walk);
    const PlanSegment& segment = model_.segments[static_cast<size_t>(index)];
    const int64_t first = walk.plan.begin + places.from;
    const int64_t end = first + places.tiles();
    expect(places.from >= 0 && first < end, "a piece of tiles", first, "to", end);
    const auto [seen_begin, seen_end] = places.taken();
    expect(seen_begin >= first && seen_end <= end, "tiles", seen_begin, "to", seen_end,
           "are taken of a piece of tiles", first, "to", end);
    if (segment.seen.begin < segment.seen.end) {
      const int64_t wanted_begin = std::max(segment.seen.begin / cuda::kTileTokens, first);
      const int64_t wanted_end =
          std::min((segment.seen.end + cuda::kTileTokens - 1) / cuda::kTileTokens, end);
      expect(wanted_begin >= wanted_end || (seen_begin <= wanted_begin && seen_end >= wanted_end),
             "of segment", index, "tiles", seen_begin, "to", seen_end, "are taken, but seen are",
             wanted_begin, "to", wanted_end);
    }
    const int64_t whole_begin = std::max(walk.whole.begin, seen_begin);
    const int64_t whole_end = std::min(walk.whole.end, seen_end);
    expect(whole_begin >= whole_end || (whole_begin * cuda::kTileTokens >= segment.whole.begin &&
                                        whole_end * cuda::kTileTokens <= segment.whole.end),
           "not all rows of segment", index, "see tiles", whole_begin, "to", whole_end);
    for (int32_t tile = seen_begin; tile < seen_end;) {
      const std::optional<Load> load = next_load(places.loads, is_long);
      expect(load.has_value(), "no load for tile", tile, "of segment", index);
      const int32_t count = is_long ? seen_end - tile : std::min(seen_end - tile, kStepTiles);
      expect(load->segment == index && load->tile == tile && load->count == count,
             "loaded is (segment, tile, count)", load->segment, load->tile, load->count,
             "where wanted is", index, tile, count);
      tile += is_long ? count : kStepTiles;
    }
  }

  // A whole segment is a result; else it is kept. Returns what is left of the stretch.
  int32_t end_piece(int warp, const cuda::WarpPlaces& places) {
    const cuda::Walk& walk = places.products;
    const int32_t count = places.tiles();
    const PlanPart part = {segment_of(walk), places.from, count};
    const bool begins = places.from == 0;
    const bool ends = places.from + count == walk.plan.tiles;
    if (begins && ends) {
      ledger_.finish({part});
    } else {
      auto& kept = kept_[static_cast<size_t>(2 * warp + (places.done == 0 ? 0 : 1))];
      expect(!kept.has_value(), "warp", warp, "keeps more pieces than it has room for");
      const cuda::PieceNote note =
          cuda::note_of<kColumns>(call_, walk, places.segment, begins, ends);
      expect(note.segment >= 0, "segment number", note.segment);
      kept = {note.segment, note.begins, note.ends, part};
    }
    expect(places.left >= count, "warp", warp, "takes", count, "of", places.left);
    return places.left - count;
  }

  // ------------------------------------------------------------------- what CTAs do

  void take_even_stretch() {
    poison_places();
    for (int warp = 0; warp < one_.warps; ++warp) {
      be(32 * warp);
      const size_t lane = static_cast<size_t>(warp) * 32;
      cuda::WarpPlaces& places = warps_[static_cast<size_t>(warp)];
      cuda::share_stretch(call_, places_[lane], warp < plan_.num_warps, places_[lane + 1].unit,
                          places);
      expect(places.left >= 0, "a stretch of", places.left, "units");
    }
    be(2);
    cuda::MergeJob end = {};
    cuda::find_even_end<kColumns, kStepTiles>(call_, plan_, places_[2], places_[3].unit, end);
    take_stretches();
    const int64_t slot = 2 * int64_t{cta_};
    const int64_t ended = ledger_.settle(kept_, slot, slot + 1);
    check_job(end, ended);
    if (ended != PlanLedger::kNone) merge_slots(end, ended);
  }

  void take_pieces() {
    std::memset(static_cast<void*>(&at_), 0xEE, sizeof at_);
    at_.walk = places_[0].walk;
    at_.enter(call_);
    at_.piece = places_[0].from;
    expect(at_.piece < at_.count, "piece", at_.piece, "of", at_.count);
    cuda::MergeJob deferred = {};
    int64_t deferred_segment = PlanLedger::kNone;
    for (int32_t index = plan_.begin; index < plan_.begin + plan_.count; ++index) {
      if (index > plan_.begin) at_.template next<kColumns>(call_);
      poison_places();
      for (int warp = 0; warp < one_.warps; ++warp) {
        be(32 * warp);
        cuda::share_piece(at_, index, warps_[static_cast<size_t>(warp)]);
      }
      be(0);
      cuda::MergeJob end = {};
      cuda::find_piece_end<kColumns>(call_, at_, index, end);
      take_stretches();
      const int64_t ended = ledger_.settle(kept_, index, index);
      check_job(end, ended);
      if (ended == PlanLedger::kNone) continue;
      // Pieces of others are waited for once the CTA has done all of its own.
      if (index + 1 == plan_.begin + plan_.count || end.first_slot >= plan_.begin) {
        merge_slots(end, ended);
      } else {
        expect(deferred_segment == PlanLedger::kNone, "CTA", cta_, "puts off two segments");
        deferred = end;
        deferred_segment = ended;
      }
    }
    if (deferred_segment != PlanLedger::kNone) merge_slots(deferred, deferred_segment);
  }

  void poison_places() {
    for (cuda::WarpPlaces& places : warps_)
      std::memset(static_cast<void*>(&places), 0xEE, sizeof places);
    kept_.fill(std::nullopt);
  }

  void take_stretches() {
    for (int warp = 0; warp < one_.warps; ++warp)
      if (warps_[static_cast<size_t>(warp)].left > 0) take_stretch(warp);
  }

  // A CTA merges what it has the last part of, and nothing else.
  void check_job(const cuda::MergeJob& job, int64_t ended) const {
    expect((job.num_slots > 0) == (ended != PlanLedger::kNone), "CTA", cta_, "merges",
           job.num_slots, "slots, and has the end of segment", ended);
  }

  void merge_slots(const cuda::MergeJob& job, int64_t wanted) {
    const PlanSegment& segment = model_.segments[static_cast<size_t>(wanted)];
    expect(job.note.first_row == segment.first_row &&
               job.note.num_pairs == segment.rows * one_.group &&
               job.note.first_pair == segment.column_tile * kColumns &&
               job.note.kv_head == segment.head,
           "other columns than those of segment", wanted, "are merged");
    std::vector<PlanPart> parts;
    for (int32_t i = 0; i < job.num_slots; ++i) {
      const std::vector<PlanPart>& more = ledger_.take(job.slot(i));
      expect(more[0].segment == wanted, "slot", job.slot(i), "is of segment", more[0].segment,
             "not of", wanted);
      parts.insert(parts.end(), more.begin(), more.end());
    }
    ledger_.finish(parts);
  }

  const PlanCase& one_;
  const PlanModel& model_;
  kernels::CallFaults faults_;
  cuda::DecodeCall call_;
  PlanLedger ledger_;
  int cta_ = 0;
  int working_ctas_ = 0;
  // Shared memory of the CTA.
  cuda::PlanShared shared_;
  cuda::PieceWalk at_;
  std::array<cuda::WarpPlaces, cuda::kMaxDecodeWarps> warps_;
  std::array<std::optional<KeptPiece>, 2 * cuda::kMaxDecodeWarps> kept_;
  std::array<cuda::StretchPlace, 32 * cuda::kMaxDecodeWarps> places_;  // of its threads
  std::array<cuda::CtaPlan, 32 * cuda::kMaxDecodeWarps> plans_;
  cuda::CtaPlan plan_ = {};
  int32_t tile_ = 0;  // that the warp loads next
};

// As PlanRun::run.
template <int kColumns>
int64_t run_columns(const PlanCase& one, const PlanModel& model) {
  switch (one.step_tiles) {
    case 1:
      return std::make_unique<PlanRun<kColumns, 1>>(one, model)->run();
    case 2:
      return std::make_unique<PlanRun<kColumns, 2>>(one, model)->run();
    case 4:
      return std::make_unique<PlanRun<kColumns, 4>>(one, model)->run();
    default:
      return std::make_unique<PlanRun<kColumns, 8>>(one, model)->run();
  }
}

}  // namespace larder::test
