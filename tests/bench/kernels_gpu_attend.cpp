// Decode attention on a GPU: CUDA graphs of many calls, each on the next of several sets of blocks,
// in the two states of gpu_states.h, beside kernels that only read.
//
// Cases of one group, and the rows asked for, take turns: all bursts first, then twice around under
// load. Microseconds are of one call, the gap between two launches included. Rates are of the K and
// V bytes that a call must read; queries, tables and results are not counted. Calls stand for the
// layers of a step: where the case allows it, every 32 share a plan, which the first of them makes.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "tests/bench/attend_call.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/gpu_pool.h"
#include "tests/bench/gpu_states.h"

namespace larder::test {
namespace {

constexpr int64_t kReadBytes = 4 * kGiB;
constexpr int kReadsPerGraph = 2;

using Row = kernels::Kernel<kernels::AttendParams>;

// Something whose graph is timed.
struct Timed {
  json fields;
  bool checked = true;
  cudaGraphExec_t graph = nullptr;
  int64_t calls = 0;  // in the graph
  int64_t bytes = 0;  // of one call
  std::vector<StateSample> burst, sustained;
};

// What a call's row uses as long as it is timed.
struct TimedCall : Timed {
  std::shared_ptr<AttendCall> call;
  std::unique_ptr<DeviceMemory> workspace;
};

// At least 24 calls (8 of the largest), every set once, and about a millisecond.
int64_t calls_per_graph(int64_t kv_bytes, int64_t sets) {
  const double us = 5.0 + static_cast<double>(kv_bytes) / 4e6;
  const auto per_millisecond = static_cast<int64_t>(1000.0 / us) + 1;
  const int64_t least = std::max<int64_t>(kv_bytes > 1'000'000'000 ? 8 : 24, per_millisecond);
  return (least + sets - 1) / sets * sets;
}

template <typename Launch>
cudaGraphExec_t capture(cudaStream_t stream, int64_t calls, const Launch& launch) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int64_t i = 0; i < calls; ++i) launch(i);
  check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, graph, 0));
  check(cudaGraphDestroy(graph));
  return executable;
}

json state_json(const Timed& timed, const std::vector<StateSample>& samples) {
  const auto calls = static_cast<double>(timed.calls);
  json rounds = json::array();
  double sum = 0;
  for (const StateSample& sample : samples) {
    sum += sample.us / calls;
    rounds.push_back({{"us_median", sample.us / calls},
                      {"us_min", sample.us_min / calls},
                      {"us_max", sample.us_max / calls},
                      {"device", sample.device}});
  }
  const double us = sum / static_cast<double>(samples.size());
  return {{"us", us},
          {"bytes_per_second", static_cast<double>(timed.bytes) / us * 1e6},
          {"rounds", rounds}};
}

class AttendBench {
 public:
  explicit AttendBench(Bench& bench) : bench_(bench), timer_(bench.stream()), read_(kReadBytes) {
    launch_fill(read_.data(), kReadBytes, Fill::kBits, 3, bench.stream());
    const auto rows = kernels::attend_kernels();
    for (const std::string& name : bench.options().rows)
      LARDER_CHECK(std::any_of(rows.begin(), rows.end(),
                               [&](const Row& row) {
                                 return row.backend == kernels::Backend::kCuda && row.name == name;
                               }),
                   "--row must name a CUDA row of attention's table", name);
  }

  // Of a group; returns when all are timed.
  void measure(const std::vector<AttendCase>& cases) {
    std::vector<TimedCall> calls;
    for (const AttendCase& c : cases) add_rows(c, calls);
    std::vector<Timed*> all;
    for (TimedCall& call : calls) all.push_back(&call);
    time(all, all.size() > 1 ? 2 : 1);
    for (TimedCall& call : calls) {
      judge(call);
      finish(call);
    }
  }

  // The kernels that only read, as if they were attention.
  void measure_reads() {
    Timed once, in_turn;
    once.fields = {{"op", "attend_read"}, {"label", "attend read"}, {"row", "read_once"}};
    in_turn.fields = {{"op", "attend_read"}, {"label", "attend read"}, {"row", "read_in_turn"}};
    for (Timed* timed : {&once, &in_turn}) {
      timed->bytes = kReadBytes;
      timed->calls = kReadsPerGraph;
      timed->graph = capture(bench_.stream(), kReadsPerGraph, [&](int64_t) {
        // The word that one thread in 2^32 may write is one that is read: the value is as good.
        (timed == &once ? launch_read_once : launch_read)(read_.data(), kReadBytes,
                                                          read_.as<uint32_t>(), bench_.stream());
      });
    }
    time({&once, &in_turn}, 1);
    for (Timed* timed : {&once, &in_turn}) finish(*timed);
  }

  // Shares need the ceilings of the whole run, so results are handed over at its end.
  void report() {
    for (const std::string state : {"burst", "sustained"}) {
      double ceiling = 0;
      for (const auto& [result, checked] : results_)
        if (result["op"] == "attend_read" && result.contains(state))
          ceiling = std::max(ceiling, result[state]["bytes_per_second"].get<double>());
      for (auto& [result, checked] : results_)
        if (ceiling > 0 && result.contains(state))
          result[state]["share_of_read"] =
              result[state]["bytes_per_second"].get<double>() / ceiling;
    }
    for (auto& [result, checked] : results_) bench_.add(std::move(result), checked);
  }

 private:
  // The rows of the table to be timed for a case: those asked for by name, or the one that serves.
  void add_rows(const AttendCase& c, std::vector<TimedCall>& calls) {
    auto call = std::make_shared<AttendCall>(c, bench_.stream());
    const kernels::AttendParams params = call->params(0);
    Status refusal = validate_attend(params, kernels::Tables::kDevice);
    if (!refusal.ok()) return bench_.skip(label_of(c), fields_of(c), refusal);
    const auto& wanted = bench_.options().rows;
    bool is_served = false;
    for (const Row& row : kernels::attend_kernels()) {
      if (row.backend != kernels::Backend::kCuda || (wanted.empty() && is_served)) continue;
      if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), row.name) == wanted.end())
        continue;
      if (Status s = row.supports(params); !s.ok()) {
        refusal = s;
        continue;
      }
      is_served = true;
      calls.push_back(prepare(c, call, row));
    }
    if (!is_served) bench_.skip(label_of(c), fields_of(c), refusal);
  }

  TimedCall prepare(const AttendCase& c, const std::shared_ptr<AttendCall>& call, const Row& row) {
    TimedCall timed;
    timed.call = call;
    timed.bytes = call->kv_bytes();
    timed.calls = calls_per_graph(timed.bytes, call->sets());
    kernels::Target target;
    target.backend = kernels::Backend::kCuda;
    target.stream = bench_.stream();
    if (row.workspace_bytes != nullptr)
      target.workspace_bytes = row.workspace_bytes(call->params(0));
    timed.workspace = std::make_unique<DeviceMemory>(target.workspace_bytes);
    target.workspace = timed.workspace->data();
    // Nobody promises a row what is in there.
    check(cudaMemset(target.workspace, 0xFF, static_cast<size_t>(target.workspace_bytes)));
    timed.fields = fields_of(c);
    timed.fields.update({{"row", row.name},
                         {"kv_bytes", timed.bytes},
                         {"sets", call->sets()},
                         {"calls_per_graph", timed.calls},
                         {"workspace_bytes", target.workspace_bytes}});
    timed.graph = capture(bench_.stream(), timed.calls,
                          [&](int64_t i) { must(row.launch(call->params(i), target)); });
    call->poison();
    check(cudaGraphLaunch(timed.graph, bench_.stream()));
    check(cudaStreamSynchronize(bench_.stream()));
    judge(timed);
    return timed;
  }

  // What the last replay gave.
  void judge(TimedCall& timed) {
    const AttendErrors errors = timed.call->errors();
    timed.fields.update({{"rel_l2", errors.rel_l2},
                         {"max_lse_error", errors.max_lse_error},
                         {"not_finite", errors.not_finite}});
    timed.checked = timed.checked && errors.ok();
    timed.fields["checked"] = timed.checked;
    if (errors.ok()) return;
    std::fprintf(stderr, "%s, %s: rel-L2 %g, largest error of an LSE %g, %lld not finite\n",
                 timed.fields["label"].get<std::string>().c_str(),
                 timed.fields["row"].get<std::string>().c_str(), errors.rel_l2,
                 errors.max_lse_error, static_cast<long long>(errors.not_finite));
  }

  void time(const std::vector<Timed*>& all, int rounds) {
    const BenchOptions& options = bench_.options();
    if (options.burst)
      for (Timed* timed : all) timed->burst.push_back(timer_.burst(timed->graph));
    for (int round = 0; options.sustained && round < rounds; ++round)
      for (Timed* timed : all)
        timed->sustained.push_back(
            timer_.sustained(timed->graph, options.load_seconds, options.replays));
  }

  void finish(Timed& timed) {
    check(cudaGraphExecDestroy(timed.graph));
    if (!timed.burst.empty()) timed.fields["burst"] = state_json(timed, timed.burst);
    if (!timed.sustained.empty()) timed.fields["sustained"] = state_json(timed, timed.sustained);
    for (const char* state : {"burst", "sustained"})
      if (timed.fields.contains(state))
        std::fprintf(stderr, "  %-60s %-22s %-9s %8.2f us %6.3f TB/s\n",
                     timed.fields["label"].get<std::string>().c_str(),
                     timed.fields["row"].get<std::string>().c_str(), state,
                     timed.fields[state]["us"].get<double>(),
                     timed.fields[state]["bytes_per_second"].get<double>() * 1e-12);
    results_.emplace_back(std::move(timed.fields), timed.checked);
  }

  Bench& bench_;
  StateTimer timer_;
  DeviceMemory read_;
  std::vector<std::pair<json, bool>> results_;
};

}  // namespace

void bench_attend(Bench& bench) {
  std::vector<std::vector<AttendCase>> groups;
  for (const AttendCase& c : attend_cases()) {
    if (!bench.wants(label_of(c))) continue;
    if (groups.empty() || groups.back().front().group != c.group) groups.emplace_back();
    groups.back().push_back(c);
  }
  if (groups.empty()) return;
  bench.begin_group("attend");
  AttendBench attend(bench);
  attend.measure_reads();
  for (size_t i = 0; i < groups.size(); ++i) {
    attend.measure(groups[i]);
    if (i == groups.size() / 2 || i + 1 == groups.size()) attend.measure_reads();
  }
  attend.report();
}

}  // namespace larder::test
