// One engine of larder-chaos: larder-generate as a process, its text so far, and whether the text
// is what it must be.
#pragma once

#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/support/node.h"

namespace larder::test {

// What an engine is asked for. Several prompts go as one batch and are printed as they end.
struct Job {
  std::vector<std::string> prompts;
  std::string execution;
  bool streams() const { return prompts.size() == 1; }
};

// Whether all of its prompts have been published, as far as can be said.
bool is_published(const Job& job, const std::set<std::string>& published);

// Prompts with the text that an undisturbed engine makes of them.
//
// The engine's own arithmetic rounds differently for other numbers of rows, and a token in a
// thousand then comes out different: so there is one text for a prompt that was found in the pool
// and one for a prompt that was not, and batches are always of the same prompts, all found.
class Texts {
 public:
  // Prompts are cut out of `source`; `calm` is a node that nothing disturbs.
  Texts(const Node& calm, const std::string& source, std::mt19937_64& random);
  Job draw(std::mt19937_64& random) const;
  Job draw_batch(std::mt19937_64& random) const;
  // What the job prints in the end, if so many tokens of its prompts were found; "" if no
  // undisturbed engine finds so many.
  std::string expected(const Job& job, int64_t hit_tokens) const;
  // Options of larder-generate for the job, pauses and all that is not the socket.
  static std::vector<std::string> arguments(const Job& job, int pause_ms);

 private:
  static constexpr size_t kPerBatch = 3;
  std::string make(const Node& calm, const Job& job);
  // With a prompt there is: only part of it would be found then.
  bool shares_a_block(const std::string& prompt) const;
  Job batch(size_t index) const;

  std::vector<std::string> prompts_;
  std::map<std::vector<std::string>, std::string> found_;
  std::map<std::vector<std::string>, std::string> not_found_;
};

class Engine {
 public:
  // The output goes to a file in the node's folder.
  Engine(const Node& node, int slot) : node_(node), slot_(slot) {}

  bool runs() const { return process_.has_value(); }
  const Job& job() const { return job_; }
  pid_t pid() const { return process_->pid(); }
  // `published` are the prompts whose blocks it must find.
  void start(Job job, const std::set<std::string>& published);
  void kill();
  // Bytes that it has printed: grows with every token of a job that streams.
  size_t printed_bytes() const;
  // Once it has ended by itself: "" when all is well, else what is not. The job's prompts are added
  // to `published` once the engine must have published them. One that met no larderd, as connecting
  // does not wait, is started again.
  std::optional<std::string> collect(const Texts& texts, std::set<std::string>& published);

 private:
  std::string output_path() const;
  bool met_no_larderd(int exit_code) const;
  std::string check(int exit_code, const Texts& texts) const;

  const Node& node_;
  int slot_;
  int starts_ = 0;
  Job job_;
  bool must_be_found_ = false;
  std::optional<Process> process_;
};

}  // namespace larder::test
