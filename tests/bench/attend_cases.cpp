// The shapes at which attention is timed.
#include <iterator>
#include <random>

#include "tests/bench/attend_call.h"

namespace larder::test {
namespace {

constexpr int32_t kK = 1024;

std::string tokens_text(int32_t tokens) {
  return tokens % kK == 0 ? std::to_string(tokens / kK) + "K" : std::to_string(tokens);
}

AttendCase batch(const std::string& group, int32_t sequences, int32_t tokens) {
  AttendCase c;
  c.shape = std::to_string(sequences) + "x" + tokens_text(tokens);
  c.group = group.empty() ? c.shape : group;
  c.seq_lens.assign(static_cast<size_t>(sequences), tokens);
  return c;
}

AttendCase with_heads(AttendCase c, int32_t q_heads, int32_t kv_heads, int32_t dim = 128) {
  c.q_heads = q_heads;
  c.kv_heads = kv_heads;
  c.dim = dim;
  return c;
}

AttendCase deterministic(AttendCase c) {
  c.deterministic = true;
  return c;
}

AttendCase alone(AttendCase c) {
  c.shares_plan = false;
  return c;
}

AttendCase transformed(AttendCase c) {
  c.key_transform = KeyTransform::kCentredRotated;
  return c;
}

// Everything that is compared with the usual case of 32 sequences of 8K.
std::vector<AttendCase> variations() {
  const AttendCase usual = batch("", 32, 8 * kK);
  std::vector<AttendCase> cases = {usual, alone(usual), transformed(usual), deterministic(usual)};
  for (const KvFormat format : {KvFormat::kFp8E4m3, KvFormat::kBf16, KvFormat::kFp16}) {
    cases.push_back(usual);
    cases.back().format = format;
  }
  cases.push_back(usual);
  cases.back().q_len = 4;
  cases.push_back(usual);
  cases.back().block_tokens = 64;
  return cases;
}

std::vector<AttendCase> windows() {
  AttendCase windowed = batch("window", 8, 32 * kK);
  windowed.window_left = kK;
  return {windowed, batch("window", 8, kK)};
}

std::vector<AttendCase> shared_prefixes() {
  AttendCase c = batch("prefix", 64, 9 * kK);
  c.shared_tokens = 8 * kK;
  std::vector<AttendCase> cases;
  for (const int32_t told : {c.shared_tokens, kFindSharedPrefix, 0}) {
    c.shared_prefix_tokens = told;
    cases.push_back(c);
    if (told != 0) cases.push_back(alone(c));
  }
  return cases;
}

AttendCase ragged() {
  AttendCase c;
  c.group = "ragged";
  c.shape = "64x1..16K";
  std::mt19937 random(31);
  std::uniform_int_distribution<int32_t> length(1, 16 * kK);
  for (int i = 0; i < 64; ++i) c.seq_lens.push_back(length(random));
  return c;
}

}  // namespace

std::string label_of(const AttendCase& c) {
  std::string text = "attend " + std::string(name(c.format)) + " " + std::to_string(c.q_heads) +
                     "/" + std::to_string(c.kv_heads) + " d" + std::to_string(c.dim) + " b" +
                     std::to_string(c.block_tokens) + " " + c.shape;
  if (c.q_len != 1) text += " q" + std::to_string(c.q_len);
  if (c.window_left >= 0) text += " window " + std::to_string(c.window_left);
  if (c.key_transform != KeyTransform::kNone) text += " " + std::string(name(c.key_transform));
  if (c.deterministic) text += " deterministic";
  if (c.shared_tokens > 0)
    text += " prefix " + tokens_text(c.shared_tokens) +
            (c.shared_prefix_tokens > 0    ? " given"
             : c.shared_prefix_tokens == 0 ? " ignored"
                                           : " found");
  if (!c.shares_plan) text += " alone";
  return text;
}

json fields_of(const AttendCase& c) {
  return {{"op", "attend"},
          {"label", label_of(c)},
          {"group", c.group},
          {"format", name(c.format)},
          {"q_heads", c.q_heads},
          {"kv_heads", c.kv_heads},
          {"dim", c.dim},
          {"block_tokens", c.block_tokens},
          {"shape", c.shape},
          {"sequences", c.seq_lens.size()},
          {"q_len", c.q_len},
          {"window_left", c.window_left},
          {"key_transform", name(c.key_transform)},
          {"deterministic", c.deterministic},
          {"shares_plan", c.shares_plan},
          {"shared_tokens", c.shared_tokens},
          {"shared_prefix_tokens", c.shared_prefix_tokens}};
}

std::vector<AttendCase> attend_cases() {
  std::vector<AttendCase> cases = variations();
  const auto add = [&](const std::vector<AttendCase>& more) {
    cases.insert(cases.end(), more.begin(), more.end());
  };
  for (const auto& [sequences, tokens] : {std::pair{1, 128 * kK}, {8, 8 * kK}, {256, kK}}) {
    const AttendCase c = batch("", sequences, tokens);
    add({c, alone(c), sequences == 256 ? transformed(c) : deterministic(c)});
  }
  add(windows());
  add(shared_prefixes());
  for (const auto& [sequences, tokens] :
       {std::pair{256, 4 * kK}, {64, 8 * kK}, {8, 32 * kK}, {1, 32 * kK}, {1, 8 * kK}, {1, kK}}) {
    const AttendCase c = batch("", sequences, tokens);
    add({c});
    if (sequences == 1) add({alone(c)});
  }
  for (const auto& [sequences, tokens] : {std::pair{256, 4 * kK},
                                          {64, 8 * kK},
                                          {32, 8 * kK},
                                          {8, 32 * kK},
                                          {1, 128 * kK},
                                          {8, 8 * kK},
                                          {1, 32 * kK},
                                          {1, 8 * kK},
                                          {1, kK},
                                          {256, kK}}) {
    const AttendCase c = batch("", sequences, tokens);
    add({with_heads(batch("64/8 " + c.shape, sequences, tokens), 64, 8)});
  }
  add({with_heads(batch("8/1", 32, 8 * kK), 8, 1)});
  add({with_heads(batch("d64", 32, 8 * kK), 64, 8, 64)});
  add({with_heads(batch("d256", 32, 8 * kK), 24, 4, 256)});
  add({ragged()});
  return cases;
}

}  // namespace larder::test
