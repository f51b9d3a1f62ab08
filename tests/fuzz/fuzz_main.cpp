// Runs a fuzz program without libFuzzer: mutates its corpus for --seconds=N from --seed=S, both
// printed. An input that breaks something is written to the current folder before the abort;
// naming a file runs that one input.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <unistd.h>

#include "tests/fuzz/fuzz.h"

namespace {

using larder::fuzz::Input;

constexpr const char* kFailedInput = "failed-input";
Input current;  // for the signal handler

void save_current(int signal) {
  const int fd = ::open(kFailedInput, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd >= 0 && ::write(fd, current.data(), current.size()) >= 0) ::close(fd);
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

class Mutator {
 public:
  Mutator(std::vector<Input> corpus, std::mt19937_64& engine)
      : corpus_(std::move(corpus)), engine_(engine) {}

  Input next() {
    Input input = corpus_[below(corpus_.size())];
    for (size_t i = 1 + below(6); i > 0; --i) mutate(input);
    input.resize(std::min(input.size(), larder::fuzz::kMaxInputBytes));
    return input;
  }

 private:
  size_t below(size_t limit) { return limit == 0 ? 0 : engine_() % limit; }

  void mutate(Input& input) {
    switch (below(6)) {
      case 0:
        if (!input.empty()) input[below(input.size())] ^= static_cast<uint8_t>(1u << below(8));
        return;
      case 1:
        if (!input.empty()) input[below(input.size())] = static_cast<uint8_t>(engine_());
        return;
      case 2: {  // a word: random, small, or near the edges
        const uint64_t words[] = {engine_(), below(300), ~uint64_t{0}, uint64_t{1} << below(64),
                                  engine_() << 32 | below(40)};
        const uint64_t word = words[below(std::size(words))];
        if (input.size() >= 8)
          std::memcpy(input.data() + 8 * below(input.size() / 8), &word, sizeof word);
        return;
      }
      case 3:
        input.resize(below(4) == 0 ? below(input.size() + 1) : below(input.size() / 8 + 1) * 8);
        return;
      case 4: {  // splice: the end of another one
        const Input& other = corpus_[below(corpus_.size())];
        const size_t cut = 8 * below(std::min(input.size(), other.size()) / 8 + 1);
        input.resize(cut);
        input.insert(input.end(), other.begin() + static_cast<ptrdiff_t>(cut), other.end());
        return;
      }
      default: {  // move words about inside
        if (input.size() < 16) return;
        const size_t from = 8 * below(input.size() / 8);
        const size_t to = 8 * below(input.size() / 8);
        const size_t size = 8 * (1 + below(4));
        if (from + size <= input.size() && to + size <= input.size())
          std::memmove(input.data() + to, input.data() + from, size);
      }
    }
  }

  std::vector<Input> corpus_;
  std::mt19937_64& engine_;
};

Input read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return Input(std::istreambuf_iterator<char>(file), {});
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = std::random_device{}();
  const char* seconds_text = std::getenv("LARDER_FUZZ_SECONDS");
  double seconds = seconds_text != nullptr ? std::atof(seconds_text) : 5;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--seed=")) {
      seed = std::strtoull(argv[i] + 7, nullptr, 10);
    } else if (argument.starts_with("--seconds=")) {
      seconds = std::atof(argv[i] + 10);
    } else {
      const Input input = read_file(argv[i]);
      return LLVMFuzzerTestOneInput(input.data(), input.size());
    }
  }
  std::printf("seed: %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::signal(SIGABRT, save_current);

  std::mt19937_64 engine(seed);
  const std::vector<Input> corpus = larder::fuzz::corpus(engine);
  for (const Input& input : corpus) {
    current = input;
    LLVMFuzzerTestOneInput(current.data(), current.size());
  }
  Mutator mutator(corpus, engine);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t num_inputs = corpus.size();
  for (; std::chrono::steady_clock::now() < end; ++num_inputs) {
    current = mutator.next();
    LLVMFuzzerTestOneInput(current.data(), current.size());
  }
  std::printf("inputs: %llu\n", static_cast<unsigned long long>(num_inputs));
  return 0;
}
