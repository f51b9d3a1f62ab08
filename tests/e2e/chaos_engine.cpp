#include "tests/e2e/chaos_engine.h"

#include <algorithm>
#include <filesystem>
#include <regex>
#include <signal.h>

#include <doctest/doctest.h>

namespace larder::test {
namespace {

constexpr size_t kNumPrompts = 12;
constexpr size_t kMinPromptBytes = 40;
constexpr size_t kMaxPromptBytes = 160;
constexpr size_t kNewTokens = 48;
constexpr int64_t kBlockTokens = 16;  // bytes of text too
const std::string kSummary = "larder-generate: ";

size_t draw_below(std::mt19937_64& random, size_t limit) {
  return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
}

std::string random_execution(std::mt19937_64& random) {
  return draw_below(random, 2) == 0 ? "in-process" : "on-request";
}

// Of prompts that were published: their whole blocks, but never all of their tokens.
int64_t hit_tokens_of(const Job& job) {
  int64_t sum = 0;
  for (const std::string& prompt : job.prompts)
    sum += (static_cast<int64_t>(prompt.size()) - 1) / kBlockTokens * kBlockTokens;
  return sum;
}

}  // namespace

Texts::Texts(const Node& calm, const std::string& source, std::mt19937_64& random) {
  while (prompts_.size() < kNumPrompts) {
    const size_t bytes = kMinPromptBytes + draw_below(random, kMaxPromptBytes - kMinPromptBytes);
    const Job job{{source.substr(draw_below(random, source.size() - bytes), bytes)}, "in-process"};
    if (shares_a_block(job.prompts[0])) continue;
    not_found_[job.prompts] = make(calm, job);
    found_[job.prompts] = make(calm, job);
    prompts_.push_back(job.prompts[0]);
  }
  for (size_t i = 0; i < kNumPrompts / kPerBatch; ++i)
    found_[batch(i).prompts] = make(calm, batch(i));
}

bool Texts::shares_a_block(const std::string& prompt) const {
  return std::any_of(prompts_.begin(), prompts_.end(), [&](const std::string& other) {
    return other.compare(0, kBlockTokens, prompt, 0, kBlockTokens) == 0;
  });
}

std::string Texts::make(const Node& calm, const Job& job) {
  std::vector<std::string> argv = {program("larder-generate"), "--socket", calm.socket()};
  for (const std::string& argument : arguments(job, 0)) argv.push_back(argument);
  const Output output = run(argv);
  REQUIRE_MESSAGE(output.exit_code == 0, output.stderr_text);
  return output.stdout_text;
}

std::vector<std::string> Texts::arguments(const Job& job, int pause_ms) {
  std::vector<std::string> list = {"--model",      std::string(LARDER_TEST_DATA) + "/tiny-lm",
                                   "--pool",       "chaos",
                                   "--execution",  job.execution,
                                   "--max-tokens", std::to_string(kNewTokens),
                                   "--pause-ms",   std::to_string(pause_ms)};
  // Not as a word of its own: a prompt may begin with a dash.
  for (const std::string& prompt : job.prompts) list.push_back("--prompt=" + prompt);
  return list;
}

Job Texts::draw(std::mt19937_64& random) const {
  return {{prompts_[draw_below(random, prompts_.size())]}, random_execution(random)};
}

Job Texts::batch(size_t index) const {
  const auto first = prompts_.begin() + static_cast<std::ptrdiff_t>(index * kPerBatch);
  return {{first, first + kPerBatch}, "in-process"};
}

Job Texts::draw_batch(std::mt19937_64& random) const {
  Job job = batch(draw_below(random, kNumPrompts / kPerBatch));
  job.execution = random_execution(random);
  return job;
}

std::string Texts::expected(const Job& job, int64_t hit_tokens) const {
  if (hit_tokens == hit_tokens_of(job)) return found_.at(job.prompts);
  return hit_tokens == 0 && job.streams() ? not_found_.at(job.prompts) : "";
}

std::string Engine::output_path() const {
  return node_.folder_file("engine" + std::to_string(slot_) + "-" + std::to_string(starts_));
}

void Engine::start(Job job, const std::set<std::string>& published) {
  constexpr int kPauseMs = 5;
  std::filesystem::remove(output_path());
  ++starts_;
  job_ = std::move(job);
  must_be_found_ = is_published(job_, published);
  std::vector<std::string> argv = {program("larder-generate"), "--socket", node_.socket()};
  for (const std::string& argument : Texts::arguments(job_, kPauseMs)) argv.push_back(argument);
  process_.emplace(argv, output_path());
}

void Engine::kill() {
  process_->signal(SIGKILL);
  REQUIRE(process_->wait_exit(std::chrono::seconds(20)).has_value());
  process_.reset();
}

size_t Engine::printed_bytes() const {
  std::error_code absent;
  const auto size = std::filesystem::file_size(output_path(), absent);
  return absent ? 0 : size;
}

std::optional<std::string> Engine::collect(const Texts& texts, std::set<std::string>& published) {
  // Text that streams begins with the prompt, and after the prompt is published.
  const bool printed = job_.streams() && read_file(output_path()).starts_with(job_.prompts[0]);
  const auto exit_code = process_->wait_exit(std::chrono::milliseconds(0));
  if (exit_code && met_no_larderd(*exit_code)) {
    start(job_, published);
    return std::nullopt;
  }
  std::optional<std::string> problem;
  if (exit_code) {
    problem = check(*exit_code, texts);
    process_.reset();
  }
  if (printed || exit_code) published.insert(job_.prompts.begin(), job_.prompts.end());
  return problem;
}

// Of the sentences of UNAVAILABLE these two are of Client::connect.
bool Engine::met_no_larderd(int exit_code) const {
  if (exit_code != 1) return false;
  const std::string output = read_file(output_path());
  return output.starts_with("UNAVAILABLE: ") &&
         (output.find("the connection is closed") != std::string::npos ||
          output.find("is not running") != std::string::npos ||
          output.find("not running: ") != std::string::npos);
}

std::string Engine::check(int exit_code, const Texts& texts) const {
  const std::string output = read_file(output_path());
  const size_t summary = output.rfind(kSummary);
  if (exit_code != 0 || summary == std::string::npos)
    return "exit status " + std::to_string(exit_code) + ": " + output;
  std::smatch match;
  const std::string line = output.substr(summary);
  if (!std::regex_search(line, match, std::regex("hit_tokens=([0-9]+)")))
    return "no hit_tokens in " + line;
  const int64_t hit_tokens = std::stoll(match[1]);
  if (must_be_found_ && hit_tokens != hit_tokens_of(job_))
    return std::to_string(hit_tokens) + " tokens of the prompts were found, not " +
           std::to_string(hit_tokens_of(job_));
  const std::string expected = texts.expected(job_, hit_tokens);
  if (output.substr(0, summary) != expected)
    return job_.execution + ": the text is\n" + output + "\nand must be\n" + expected;
  return "";
}

bool is_published(const Job& job, const std::set<std::string>& published) {
  return std::all_of(job.prompts.begin(), job.prompts.end(),
                     [&](const std::string& prompt) { return published.contains(prompt); });
}

}  // namespace larder::test
