// The main of every test program: doctest plus --seed=N.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>

#include <doctest/doctest.h>

#include "tests/support/random.h"

namespace larder::test {
namespace {
uint64_t program_seed = 0;
}  // namespace

uint64_t seed() { return program_seed; }
}  // namespace larder::test

int main(int argc, char** argv) {
  larder::test::program_seed = std::random_device{}();
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--seed="))
      larder::test::program_seed = std::strtoull(argv[i] + 7, nullptr, 10);
  }
  doctest::Context context(argc, argv);
  const int failed = context.run();
  std::printf("seed: %llu\n", static_cast<unsigned long long>(larder::test::seed()));
  return failed;
}
