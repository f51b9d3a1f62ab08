#include "client/examples/generate.h"

#include <algorithm>
#include <limits>

namespace larder::examples {
namespace {

int32_t best_token(const Matrix& logits, Eigen::Index row) {
  int32_t best = 0;
  float best_logit = -std::numeric_limits<float>::infinity();
  for (int32_t token = 0; token < kByteVocabulary; ++token) {
    if (logits(row, token) > best_logit) {
      best = token;
      best_logit = logits(row, token);
    }
  }
  return best;
}

}  // namespace

std::string Generation::text() const {
  std::string text;
  for (const int32_t token : tokens) text += static_cast<char>(token);
  return text;
}

bool Generator::finished() const {
  return std::all_of(generations_.begin(), generations_.end(),
                     [](const Generation& generation) { return generation.finished; });
}

Status Generator::start(const std::string& prompt) {
  const auto context_tokens = static_cast<size_t>(model_.config().context_tokens);
  if (prompt.empty() || prompt.size() > context_tokens)
    return Status(ErrorCode::kInvalidArgument,
                  "prompt " + std::to_string(generations_.size()) + " has " +
                      std::to_string(prompt.size()) + " tokens, expected 1 to " +
                      std::to_string(context_tokens) + ", the context of " + model_.name());
  Generation generation;
  for (const char c : prompt) generation.tokens.push_back(static_cast<uint8_t>(c));
  generation.prompt_tokens = static_cast<int64_t>(prompt.size());
  Sequence sequence = runner_.pool().begin_sequence();
  if (options_.reuse_prefix) {
    const auto hit_tokens = sequence.adopt_prefix(generation.tokens);
    if (!hit_tokens) return hit_tokens.status();
    generation.hit_tokens = *hit_tokens;
  }
  generations_.push_back(std::move(generation));
  sequences_.push_back(std::move(sequence));
  return {};
}

Status Generator::prefill(std::span<const std::string> prompts) {
  LARDER_CHECK(generations_.empty(), "a Generator is used for one set of prompts");
  for (const std::string& prompt : prompts)
    if (Status status = start(prompt); !status.ok()) return status;
  const auto waiting = [this] {
    return std::any_of(generations_.begin(), generations_.end(), [](const Generation& generation) {
      return generation.num_new_tokens() == 0;
    });
  };
  while (waiting())
    if (Status status = prefill_pass(); !status.ok()) return status;
  return {};
}

Status Generator::prefill_pass() {
  Batch batch;
  std::vector<size_t> members;
  for (size_t i = 0; i < generations_.size(); ++i) {
    const auto& generation = generations_[i];
    if (generation.num_new_tokens() > 0) continue;
    const int64_t done_tokens = sequences_[i].num_tokens();
    const int64_t rows =
        std::min(generation.prompt_tokens - done_tokens, options_.prefill_rows - batch.num_rows());
    if (rows <= 0) break;
    const auto tokens = std::span(generation.tokens)
                            .subspan(static_cast<size_t>(done_tokens), static_cast<size_t>(rows));
    if (Status status = batch.add(sequences_[i], tokens); !status.ok()) return status;
    members.push_back(i);
  }
  return run(batch, members);
}

Status Generator::step() {
  Batch batch;
  std::vector<size_t> members;
  for (size_t i = 0; i < generations_.size(); ++i) {
    if (generations_[i].finished) continue;
    const auto last_token = std::span(generations_[i].tokens).last(1);
    if (Status status = batch.add(sequences_[i], last_token); !status.ok()) return status;
    members.push_back(i);
  }
  return batch.empty() ? Status() : run(batch, members);
}

// One forward pass. A member whose tokens are all in the pool now has its next token chosen.
Status Generator::run(Batch& batch, std::span<const size_t> members) {
  const auto logits = runner_.forward(batch, batch.last_rows());
  if (!logits) return logits.status();
  for (size_t i = 0; i < members.size(); ++i) {
    const size_t index = members[i];
    Generation& generation = generations_[index];
    const int64_t num_tokens = sequences_[index].num_tokens();
    generation.appended_tokens = num_tokens - generation.hit_tokens;
    generation.blocks = static_cast<int64_t>(sequences_[index].blocks().size());
    if (num_tokens < static_cast<int64_t>(generation.tokens.size())) continue;
    const int32_t token = best_token(*logits, static_cast<Eigen::Index>(i));
    if (Status status = accept_token(index, token); !status.ok()) return status;
  }
  return {};
}

Status Generator::accept_token(size_t index, int32_t token) {
  Generation& generation = generations_[index];
  generation.tokens.push_back(token);
  if (generation.num_new_tokens() == 1 && options_.reuse_prefix)
    if (Status status = publish(index); !status.ok()) return status;
  const auto& end_tokens = model_.config().end_tokens;
  const bool ended = std::find(end_tokens.begin(), end_tokens.end(), token) != end_tokens.end();
  const bool full = static_cast<int64_t>(generation.tokens.size()) > model_.config().context_tokens;
  if (ended || full || generation.num_new_tokens() >= options_.max_tokens) return finish(index);
  return {};
}

// The last token is never published: its K and V are computed by the next pass.
Status Generator::publish(size_t index) {
  Sequence& sequence = sequences_[index];
  return sequence.publish(
      std::span(generations_[index].tokens).first(static_cast<size_t>(sequence.num_tokens())));
}

Status Generator::finish(size_t index) {
  generations_[index].finished = true;
  if (options_.reuse_prefix)
    if (Status status = publish(index); !status.ok()) return status;
  return sequences_[index].end();
}

}  // namespace larder::examples
