#include "tests/kernels/cuda/attend_plan_model.h"

#include <algorithm>
#include <array>

namespace larder::test {
namespace {

constexpr int64_t kTileTokens = 16;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A sequence as it is served.
struct Served {
  int32_t sequence = 0;
  int64_t first_row = 0;
  int64_t q_len = 0;
  int64_t rows = 0;
  int64_t seq_len = 0;
  int64_t keys = 0;    // of this rank
  int64_t prefix = 0;  // keys that have been attended
};

class Modeller {
 public:
  explicit Modeller(const PlanCase& one) : one_(one) {}

  PlanModel run() {
    int64_t first_row = 0;
    int64_t q_sum = 0;
    for (int32_t i = 0; i < one_.num_seqs(); ++i) {
      Served served = serve(i);
      if (q_sum <= one_.num_rows && served.q_len > one_.num_rows - q_sum) report(served.q_len);
      q_sum += served.q_len;
      served.first_row = first_row;
      served.rows = std::min(served.q_len, one_.num_rows - first_row);
      first_row += served.rows;
      add_segments(served);
    }
    const int64_t rest = one_.num_rows - first_row;
    add_segments({one_.num_seqs(), first_row, rest, rest, 0, 0, 0});
    return model_;
  }

 private:
  void report(int64_t value) { model_.reports.push_back(value); }

  // Lengths cut to what fits.
  Served serve(int32_t sequence) {
    const auto index = static_cast<size_t>(sequence);
    Served served;
    served.sequence = sequence;
    served.q_len = one_.q_lens[index];
    served.seq_len = one_.seq_lens[index];
    if (served.q_len < 0) {
      report(served.q_len);
      served.q_len = 0;
    }
    served.keys = local_tokens(one_.shard, std::max<int64_t>(served.seq_len, 0));
    if (served.seq_len < 0) {
      report(served.seq_len);
      served.seq_len = 0;
    } else if (served.keys > one_.max_tokens) {
      report(served.seq_len);
      served.keys = one_.max_tokens;
      served.seq_len = global_token(one_.shard, one_.max_tokens);
    }
    if (!one_.mask_offsets.empty()) {
      const int64_t offset = one_.mask_offsets[index];
      const int64_t wanted = divide_up(served.q_len * served.seq_len, 8);
      if (offset < 0 || offset > one_.mask_bytes || wanted > one_.mask_bytes - offset) {
        report(offset);
        served.keys = 0;
      }
    }
    if (!one_.prefix_tokens.empty()) served.prefix = one_.prefix_tokens[index];
    return served;
  }

  // Of a row of a sequence, as far as causality and the window go.
  KeyRange visible(const Served& served, int64_t row) const {
    const int64_t position = served.seq_len - served.q_len + row;
    KeyRange keys = {0, served.keys};
    if (one_.window_left >= 0 && position > one_.window_left)
      keys.begin = local_tokens(one_.shard, position - one_.window_left);
    if (one_.is_causal)
      keys.end = std::min(local_tokens(one_.shard, std::max<int64_t>(position + 1, 0)), keys.end);
    return keys;
  }

  void add_segments(const Served& served) {
    if (served.rows == 0) return;
    const bool is_sequence = served.sequence < one_.num_seqs();
    int64_t begin = is_sequence ? visible(served, 0).begin : 0;
    begin = std::min(std::max(begin, served.prefix), served.keys);
    PlanSegment segment;
    segment.sequence = served.sequence;
    segment.first_row = served.first_row;
    segment.rows = served.rows;
    segment.first_tile = begin / kTileTokens;
    segment.tiles = std::max<int64_t>(divide_up(served.keys, kTileTokens) - segment.first_tile, 1);
    const int64_t column_tiles = divide_up(served.rows * one_.group, one_.columns);
    for (segment.head = 0; segment.head < one_.num_kv_heads; ++segment.head)
      for (segment.column_tile = 0; segment.column_tile < column_tiles; ++segment.column_tile) {
        view(served, segment);
        model_.segments.push_back(segment);
        model_.num_units += units_of(segment.tiles);
      }
  }

  void view(const Served& served, PlanSegment& segment) const {
    const int64_t first_pair = int64_t{segment.column_tile} * one_.columns;
    segment.seen = {served.keys, 0};
    segment.whole = {0, served.keys};
    for (int64_t row = first_pair / one_.group;
         row < served.rows && row * one_.group < first_pair + one_.columns; ++row) {
      const KeyRange keys = visible(served, row);
      segment.whole.begin = std::max(segment.whole.begin, keys.begin);
      segment.whole.end = std::min(segment.whole.end, keys.end);
      if (keys.begin >= keys.end) continue;
      segment.seen.begin = std::min(segment.seen.begin, std::max(keys.begin, served.prefix));
      segment.seen.end = std::max(segment.seen.end, keys.end);
    }
  }

  int64_t units_of(int64_t tiles) const {
    if (one_.piece_tiles == 0) return one_.begin_tiles + tiles;
    return divide_up(tiles, std::max<int64_t>(one_.piece_tiles, divide_up(tiles, one_.max_pieces)));
  }

  const PlanCase& one_;
  PlanModel model_;
};

}  // namespace

std::string PlanCase::to_string() const {
  std::ostringstream text;
  text << num_seqs() << " sequences, " << num_rows << " rows, " << num_kv_heads << " KV heads of "
       << group << ", block_tokens " << block_tokens << ", max_tokens " << max_tokens << ", rank "
       << shard.rank << " of " << shard.num_ranks << " by " << shard.interleave << ", window_left "
       << window_left << (is_causal ? ", causal" : "") << (mask_offsets.empty() ? "" : ", masked")
       << (prefix_tokens.empty() ? "" : ", prefix") << ", piece_tiles " << piece_tiles
       << ", max_pieces " << max_pieces << ", begin_tiles " << begin_tiles << ", " << columns
       << " columns, steps of " << step_tiles << ", " << grid << " CTAs of " << warps
       << " warps; q_len/seq_len:";
  constexpr size_t kShown = 12;
  for (size_t i = 0; i < std::min(q_lens.size(), kShown); ++i)
    text << ' ' << q_lens[i] << '/' << seq_lens[i];
  if (q_lens.size() > kShown) text << " ...";
  return text.str();
}

PlanModel model_of(const PlanCase& one) { return Modeller(one).run(); }

int64_t PlanModel::find(int32_t sequence, int32_t head, int32_t column_tile) const {
  const auto place = [](const PlanSegment& at) {
    return std::array{at.sequence, at.head, at.column_tile};
  };
  const std::array wanted = {sequence, head, column_tile};
  const auto found =
      std::lower_bound(segments.begin(), segments.end(), wanted,
                       [&](const PlanSegment& at, const auto& other) { return place(at) < other; });
  expect(found != segments.end() && place(*found) == wanted,
         "no such segment (sequence, head, column tile):", sequence, head, column_tile);
  return found - segments.begin();
}

PlanLedger::PlanLedger(const PlanCase& one, const PlanModel& model)
    : model_(model), most_slots_(one.num_slots), is_finished_(model.segments.size()) {}

void PlanLedger::finish(const std::vector<PlanPart>& parts) {
  expect(!parts.empty(), "a result of nothing");
  const auto segment = static_cast<size_t>(parts[0].segment);
  expect(!is_finished_[segment], "a second result of segment", segment);
  is_finished_[segment] = true;
  int64_t tile = 0;
  for (const PlanPart& part : parts) {
    expect(part.segment == parts[0].segment, "segments", part.segment, "and", segment,
           "in one result");
    expect(part.from == tile, "segment", segment, "goes on at tile", part.from, "after", tile);
    tile += part.count;
  }
  expect(tile == model_.segments[segment].tiles, "segment", segment, "ends with tile", tile, "of",
         model_.segments[segment].tiles);
}

int64_t PlanLedger::settle(std::span<std::optional<KeptPiece>> kept, int64_t other_slot,
                           int64_t first_slot) {
  int64_t ended = kNone;
  for (size_t first = 0; first < kept.size(); ++first) {
    if (!kept[first].has_value()) continue;
    const int64_t number = kept[first]->number;
    const bool begins = kept[first]->begins;
    bool ends = false;
    std::vector<PlanPart> parts;
    for (size_t i = first; i < kept.size(); ++i) {
      if (!kept[i].has_value() || kept[i]->number != number) continue;
      parts.push_back(kept[i]->part);
      ends = kept[i]->ends;
      kept[i].reset();
    }
    if (begins && ends) {
      finish(parts);
      continue;
    }
    write(begins ? first_slot : other_slot, parts);
    if (ends) ended = parts[0].segment;
  }
  return ended;
}

void PlanLedger::write(int64_t slot, const std::vector<PlanPart>& parts) {
  expect(slot >= 0 && slot < most_slots_, "slot", slot, "of", most_slots_);
  for (size_t i = 1; i < parts.size(); ++i)
    expect(parts[i].segment == parts[0].segment &&
               parts[i].from == parts[i - 1].from + parts[i - 1].count,
           "after (segment, from, count)", parts[i - 1].segment, parts[i - 1].from,
           parts[i - 1].count, "comes segment", parts[i].segment, "from", parts[i].from);
  const bool is_new = slots_.emplace(slot, Slot{parts}).second;
  expect(is_new, "a second part for slot", slot);
}

const std::vector<PlanPart>& PlanLedger::take(int64_t slot) {
  const auto found = slots_.find(slot);
  expect(found != slots_.end(), "waits for a slot that no CTA up to it writes:", slot);
  expect(!found->second.is_taken, "taken twice: slot", slot);
  found->second.is_taken = true;
  return found->second.parts;
}

void PlanLedger::check_complete() const {
  for (const auto& [slot, content] : slots_)
    expect(content.is_taken, "nobody takes what is in slot", slot);
  for (size_t i = 0; i < is_finished_.size(); ++i)
    expect(is_finished_[i], "no result of segment", i);
}

}  // namespace larder::test
