#include "tests/kernels/cuda/attend_plan_cases.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <random>

#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kTileTokens = 16;
constexpr int64_t kMostTokens = kMaxInt - 64;  // of a row of the block table, as they are counted
constexpr int64_t kMostCtas = 256;             // that the host launches
constexpr int64_t kMostSlots = 60000;

enum class Size { kFew, kMany, kHuge, kFull };  // kFull: close to 2^31 units
enum class Lengths { kRight, kSomeWrong, kManyWrong };

class Draw {
 public:
  explicit Draw(uint64_t number) : engine_(random_engine(number)) {}

  PlanCase draw() {
    one_ = {};
    const int64_t kind = between(0, 9);
    size_ = kind == 0   ? Size::kHuge
            : kind == 1 ? Size::kMany
            : kind == 2 ? Size::kFull
                        : Size::kFew;
    lengths_ = one_in(2) ? Lengths::kRight : one_in(2) ? Lengths::kSomeWrong : Lengths::kManyWrong;
    one_.columns = one_in(2) ? 8 : 16;
    one_.step_tiles = 1 << between(0, 3);
    draw_heads();
    draw_table();
    if (size_ == Size::kFull)
      draw_full_lengths();
    else
      draw_lengths();
    if (size_ != Size::kFull) draw_visibility();
    draw_launch();
    return one_;
  }

  // Whether the host would take the case that was drawn last, and books can be kept over it.
  bool is_fitting() const {
    return most_segments() * static_cast<double>(most_tiles() + one_.begin_tiles) < 0x1p31 &&
           one_.num_slots <= kMostSlots;
  }

 private:
  int64_t between(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(engine_);
  }
  bool one_in(int64_t count) { return between(1, count) == 1; }

  void draw_heads() {
    switch (size_) {
      case Size::kFew:
        num_seqs_ = between(0, one_in(2) ? 6 : 40);
        break;
      case Size::kMany:
        num_seqs_ = between(300, 1200);
        break;
      case Size::kHuge:
        num_seqs_ = between(0, 4);
        break;
      case Size::kFull:
        num_seqs_ = between(1, 9);
        break;
    }
    one_.num_kv_heads = static_cast<int32_t>(between(1, size_ == Size::kFew ? 8 : 2));
    one_.group = static_cast<int32_t>(one_in(3) ? between(1, 20) : int64_t{1} << between(0, 4));
    if (size_ == Size::kHuge && one_in(2)) one_.group = static_cast<int32_t>(between(1, 4));
    if (size_ != Size::kFull) return;
    one_.num_kv_heads = 1;
    one_.group = one_in(2) ? one_.columns : 1 << between(0, 3);
  }

  void draw_table() {
    one_.block_tokens = 16 << between(0, 3);
    switch (size_) {
      case Size::kFew:
        one_.block_table_stride = between(1, one_in(3) ? 600 : 60);
        break;
      case Size::kMany:
        one_.block_table_stride = between(1, 12);
        break;
      case Size::kHuge:
        one_.block_table_stride = between(1 << 20, (kMaxInt + 1) / one_.block_tokens + 5);
        break;
      case Size::kFull:
        one_.block_tokens = 16;
        one_.block_table_stride = 1 << 27;
        break;
    }
    one_.max_tokens = static_cast<int32_t>(kMostTokens);
    if (one_.block_table_stride <= kMostTokens / one_.block_tokens)
      one_.max_tokens = static_cast<int32_t>(one_.block_table_stride * one_.block_tokens);
    if (size_ == Size::kFull) {
      one_.max_tokens -= static_cast<int32_t>(between(0, 1000));
    } else if (one_in(3)) {
      one_.shard.num_ranks = static_cast<int32_t>(between(2, 5));
      one_.shard.rank = static_cast<int32_t>(between(0, one_.shard.num_ranks - 1));
      one_.shard.interleave = static_cast<int32_t>(one_in(2) ? between(1, 40) : 1 << between(0, 9));
    }
    max_length_ = std::min(int64_t{one_.max_tokens} * one_.shard.num_ranks, kMaxInt);
  }

  int64_t draw_seq_len() {
    int64_t length = 0;
    if (one_in(3))
      length = between(0, max_length_);
    else if (one_in(2))
      length = between(0, std::min<int64_t>(max_length_, 40));
    else if (!one_in(6))
      length = std::max<int64_t>(max_length_ - between(0, 100), 0);
    while (local_tokens(one_.shard, length) > one_.max_tokens) length -= 1 + length / 100;
    return length;
  }

  void draw_lengths() {
    const int64_t most_queries = size_ == Size::kFew ? 30 : 3;
    int64_t q_sum = 0;
    for (int64_t i = 0; i < num_seqs_; ++i) {
      int64_t q_len = one_in(10) ? 0 : one_in(3) ? between(1, most_queries) : 1;
      int64_t seq_len = draw_seq_len();
      q_sum += q_len;
      if (lengths_ != Lengths::kRight) spoil(q_len, seq_len);
      one_.q_lens.push_back(static_cast<int32_t>(q_len));
      one_.seq_lens.push_back(static_cast<int32_t>(seq_len));
    }
    one_.num_rows =
        static_cast<int32_t>(std::max<int64_t>(q_sum + (one_in(3) ? between(0, 20) : 0), 1));
    if (lengths_ != Lengths::kRight && one_in(2))
      one_.num_rows = static_cast<int32_t>(between(1, std::max<int64_t>(q_sum, 1)));
  }

  void spoil(int64_t& q_len, int64_t& seq_len) {
    switch (between(0, lengths_ == Lengths::kSomeWrong ? 12 : 5)) {
      case 0:
        q_len = -between(1, kMaxInt + 1);
        break;
      case 1:
        seq_len = -between(1, kMaxInt + 1);
        break;
      case 2:
        seq_len = between(0, kMaxInt);
        break;
      case 3:
        q_len = one_in(2) ? kMaxInt : between(0, kMaxInt);
        break;
      case 4:
        q_len = between(0, 50);
        break;
      default:
        break;
    }
  }

  // As many rows as leave the call below 2^31 units, of contexts that fill the table or pass it.
  void draw_full_lengths() {
    one_.num_rows =
        static_cast<int32_t>(std::max<int64_t>((13 - num_seqs_) * one_.columns / one_.group, 1));
    int64_t left = one_.num_rows;
    for (int64_t i = 0; i < num_seqs_; ++i) {
      int64_t q_len = i + 1 == num_seqs_ ? left : between(0, left);
      left -= q_len;
      int64_t seq_len = kMaxInt - 1100 - between(0, 40);
      if (lengths_ != Lengths::kRight) {
        q_len = one_in(3) ? between(0, one_.num_rows) : kMaxInt;
        if (one_in(3)) seq_len = kMaxInt;
      }
      one_.q_lens.push_back(static_cast<int32_t>(q_len));
      one_.seq_lens.push_back(static_cast<int32_t>(seq_len));
    }
  }

  void draw_visibility() {
    if (one_in(3))
      one_.window_left =
          static_cast<int32_t>(one_in(2) ? between(0, 100) : between(0, max_length_));
    one_.is_causal = !one_in(4);
    if (!one_.is_causal && one_in(3)) {
      one_.mask_bytes = one_in(2) ? 1000 : int64_t{1} << 40;
      for (int64_t i = 0; i < num_seqs_; ++i) one_.mask_offsets.push_back(between(-1, 900));
    } else if (one_in(4)) {
      for (const int32_t seq_len : one_.seq_lens) {
        const int64_t keys =
            std::min<int64_t>(local_tokens(one_.shard, std::max(seq_len, 0)), one_.max_tokens);
        const int64_t blocks = one_in(2) ? keys / 2 / one_.block_tokens : 0;
        one_.prefix_tokens.push_back(static_cast<int32_t>(blocks * one_.block_tokens));
      }
    }
  }

  void draw_launch() {
    constexpr int kGrids[] = {1, 2, 3, 7, 16, 33, 78, 131, 132};
    constexpr int kWarps[] = {4, 8, 12, 1, 2, 3};
    one_.grid =
        static_cast<int>(one_in(2) ? kGrids[between(0, static_cast<int64_t>(std::size(kGrids)) - 1)]
                                   : between(1, one_in(4) ? 132 : 16));
    one_.warps = kWarps[between(0, one_in(4) ? 5 : 2)];
    one_.num_slots = 2 * kMostCtas;
    if (one_in(2)) {
      one_.begin_tiles = one_in(4) ? 0 : static_cast<int32_t>(between(1, 12));
      // Right or wrong, they decide how evenly CTAs share alone.
      if (one_in(2)) {
        one_.num_segments = static_cast<int32_t>(between(1, 8));
        one_.whole_ctas = static_cast<int32_t>(between(0, one_.grid));
      }
      return;
    }
    const bool is_given = one_in(2);  // how many pieces, by num_splits
    one_.piece_tiles = is_given ? 1 : 256;
    one_.max_pieces = is_given ? static_cast<int32_t>(between(1, 64)) : 32;
    if (one_in(3)) one_.piece_tiles = static_cast<int32_t>(between(1, 20));
    one_.num_slots = static_cast<int64_t>(
        most_segments() * static_cast<double>(std::min<int64_t>(
                              one_.max_pieces, most_tiles() / one_.piece_tiles + 1)));
  }

  // As the host counts them, from shapes.
  double most_segments() const {
    return (static_cast<double>(one_.num_rows) * one_.group / one_.columns +
            static_cast<double>(num_seqs_) + 2) *
           one_.num_kv_heads;
  }
  int64_t most_tiles() const { return one_.max_tokens / kTileTokens + 1; }

  std::mt19937_64 engine_;
  PlanCase one_;
  Size size_ = Size::kFew;
  Lengths lengths_ = Lengths::kRight;
  int64_t num_seqs_ = 0;
  int64_t max_length_ = 0;
};

}  // namespace

PlanCase random_plan_case(uint64_t number) {
  Draw draw(number);
  while (true) {
    PlanCase one = draw.draw();
    if (draw.is_fitting()) return one;
  }
}

}  // namespace larder::test
