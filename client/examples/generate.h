// Greedy decoding of several prompts as one batch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/examples/model_runner.h"
#include "larder/client.h"

namespace larder::examples {

struct GenerateOptions {
  int32_t max_tokens = 160;    // new tokens per prompt; fewer where the model's context ends
  int32_t prefill_rows = 512;  // rows of one prefill pass
  bool reuse_prefix = true;    // start from published blocks, and publish
};

// One prompt and what has been made of it.
struct Generation {
  std::vector<int32_t> tokens;  // the prompt, then the new tokens
  int64_t prompt_tokens = 0;
  int64_t hit_tokens = 0;       // of the prompt, found in the pool
  int64_t appended_tokens = 0;  // whose K and V this run computed
  int64_t blocks = 0;           // that the sequence held at its longest
  bool finished = false;

  int64_t num_new_tokens() const { return static_cast<int64_t>(tokens.size()) - prompt_tokens; }
  std::string text() const;  // prompt included
};

// Used by one thread. The runner must outlive it. After a refusal only the destructor may be
// called: K and V of the tokens in work may be missing in some layers.
class Generator {
 public:
  Generator(ModelRunner& runner, const GenerateOptions& options)
      : runner_(runner), model_(runner.model()), options_(options) {}

  // INVALID_ARGUMENT for a prompt that is empty or longer than the context. All prompts go through
  // together, prefill_rows at a time; each then has its first new token.
  Status prefill(std::span<const std::string> prompts);
  // One more token for each prompt that is not finished.
  Status step();

  bool finished() const;
  std::span<const Generation> generations() const { return generations_; }
  // The blocks of prompt `index`; empty once it is finished.
  std::span<const int32_t> block_ids(size_t index) const { return sequences_[index].block_ids(); }

 private:
  Status start(const std::string& prompt);
  Status prefill_pass();
  Status run(Batch& batch, std::span<const size_t> members);
  Status accept_token(size_t index, int32_t token);
  Status publish(size_t index);
  Status finish(size_t index);

  ModelRunner& runner_;
  const Model& model_;
  GenerateOptions options_;
  std::vector<Generation> generations_;
  std::vector<Sequence> sequences_;  // [generations_.size()]
};

}  // namespace larder::examples
