// Times the CUDA rows of the kernel tables on one GPU, tuned and portable side by side, each
// checked against the CPU's row on the same inputs.
//
//   kernels_gpu_bench [--commit TEXT] [--replays N] [FILTER...] > kernels-gpu.json
//
// A filter is a part of a label, such as "append/nvfp4" or "gather/"; one of them must match. Raw
// figures go to stdout as JSON, progress to stderr. Exit status 1 if bytes differ anywhere.
#include <cstdio>
#include <cstdlib>

#include "tests/bench/gpu_pool.h"

namespace larder::test {
namespace {

BenchOptions parse(const std::vector<std::string>& arguments) {
  BenchOptions options;
  if (const char* commit = std::getenv("LARDER_COMMIT")) options.commit = commit;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool has_value = i + 1 < arguments.size();
    if (arguments[i] == "--commit" && has_value)
      options.commit = arguments[++i];
    else if (arguments[i] == "--replays" && has_value)
      options.replays = std::atoi(arguments[++i].c_str());
    else
      options.filters.push_back(arguments[i]);
  }
  LARDER_CHECK(options.replays > 0, "--replays must be a number of 1 or more");
  return options;
}

int run(const std::vector<std::string>& arguments) {
  check(cudaSetDevice(0));
  Bench bench(parse(arguments));
  bench_append(bench);
  bench_gather(bench);
  bench_convert(bench);
  bench_blocks(bench);
  bench_host_copies(bench);
  std::puts(bench.finish().dump(1).c_str());
  return bench.all_checked() ? 0 : 1;
}

}  // namespace
}  // namespace larder::test

int main(int argc, char** argv) { return larder::test::run({argv + 1, argv + argc}); }
