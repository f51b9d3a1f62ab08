// larder-sim: simulates nodes, episode by episode, until so many events have been applied.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>

#include "tests/simulation/simulate.h"

namespace {

using larder::sim::Run;

// Of the episode that runs, for the line that a failed check of the code under test leaves behind.
char repeat_line[160];

extern "C" void on_abort(int) {
  const ssize_t written = ::write(STDERR_FILENO, repeat_line, std::strlen(repeat_line));
  (void)written;
  ::_exit(1);
}

[[noreturn]] void usage() {
  std::fputs(
      "larder-sim --seed N [--events M] [--episode E] [--only-check-every K] [--pidfd-only]\n"
      "           [--verbose]\n"
      "Simulates nodes until M events (default 100000) have been applied. With --episode, that\n"
      "episode alone. Exit status 1: an invariant did not hold, and the command that repeats it.\n",
      stderr);
  std::exit(2);
}

Run parse(int argc, char** argv) {
  Run run;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--verbose") {
      run.options.verbose = true;
      continue;
    }
    if (option == "--pidfd-only") {
      run.options.pidfd_only = true;
      continue;
    }
    char* end = nullptr;
    const uint64_t number = i + 1 < argc ? std::strtoull(argv[++i], &end, 10) : 0;
    if (end == nullptr || *end != '\0') usage();
    if (option == "--seed") {
      run.seed = number;
    } else if (option == "--events") {
      run.num_events = number;
    } else if (option == "--episode") {
      run.only_episode = number;
    } else if (option == "--only-check-every" && number > 0) {
      run.options.check_every = static_cast<int>(number);
    } else {
      usage();
    }
  }
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  Run run = parse(argc, argv);
  std::signal(SIGABRT, on_abort);
  run.on_episode = [&](const std::string& repeat) {
    std::snprintf(repeat_line, sizeof repeat_line, "repeat with: %s\n", repeat.c_str());
  };
  const auto started = std::chrono::steady_clock::now();
  larder::sim::Coverage coverage;
  const std::string failure = larder::sim::simulate(run, coverage);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  std::fputs(coverage.table().c_str(), stdout);
  std::printf("seed %llu: %llu events in %.1f s, %.0f a second\n",
              static_cast<unsigned long long>(run.seed),
              static_cast<unsigned long long>(coverage.num_events), seconds.count(),
              static_cast<double>(coverage.num_events) / seconds.count());
  if (failure.empty()) return 0;
  std::printf("FAILED %s\n%s", failure.c_str(), repeat_line);
  return 1;
}
