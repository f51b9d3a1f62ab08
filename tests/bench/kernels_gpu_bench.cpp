// Times the CUDA rows of the kernel tables on one GPU, tuned and portable side by side, each
// checked against the CPU's row on the same inputs; attention against float64.
//
//   kernels_gpu_bench [--commit TEXT] [--replays N] [FILTER...] > kernels-gpu.json
//   kernels_gpu_bench [--seconds S] [--state sustained|burst|both] [--row NAME]... attend > x.json
//
// A filter is a part of a label, such as "append/nvfp4", "gather/" or "attend nvfp4 32/8"; one of
// them must match. Of attention the row that serves a call is timed, or each of the rows named,
// after S seconds (1.5) of its own load (sustained) and after a pause (burst). Raw figures go to
// stdout as JSON, progress to stderr. Exit status 1 if a result is wrong anywhere.
#include <cstdio>
#include <cstdlib>

#include "tests/bench/gpu_pool.h"

namespace larder::test {
namespace {

void choose_states(const std::string& text, BenchOptions& options) {
  LARDER_CHECK(text == "sustained" || text == "burst" || text == "both",
               "--state must be sustained, burst or both");
  options.burst = text != "sustained";
  options.sustained = text != "burst";
}

BenchOptions parse(const std::vector<std::string>& arguments) {
  BenchOptions options;
  if (const char* commit = std::getenv("LARDER_COMMIT")) options.commit = commit;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool has_value = i + 1 < arguments.size();
    if (arguments[i] == "--commit" && has_value)
      options.commit = arguments[++i];
    else if (arguments[i] == "--replays" && has_value)
      options.replays = std::atoi(arguments[++i].c_str());
    else if (arguments[i] == "--seconds" && has_value)
      options.load_seconds = std::atof(arguments[++i].c_str());
    else if (arguments[i] == "--row" && has_value)
      options.rows.push_back(arguments[++i]);
    else if (arguments[i] == "--state" && has_value)
      choose_states(arguments[++i], options);
    else
      options.filters.push_back(arguments[i]);
  }
  LARDER_CHECK(options.replays > 0, "--replays must be a number of 1 or more");
  LARDER_CHECK(options.load_seconds > 0, "--seconds must be a number above 0");
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
  bench_attend(bench);
  std::puts(bench.finish().dump(1).c_str());
  return bench.all_checked() ? 0 : 1;
}

}  // namespace
}  // namespace larder::test

int main(int argc, char** argv) { return larder::test::run({argv + 1, argv + argc}); }
