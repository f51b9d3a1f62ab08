// larder-chaos: engines write text while engines, larderd, executor and keeper are killed at
// random.
//
//   larder-chaos --seed=N            LARDER_CHAOS_ROUNDS=N (default 40); a round is one kill
//
// Each text must be the undisturbed one, each engine must find what was published before its start,
// and in the end nothing may be held, and processes be as big as in the beginning. The keeper and
// larderd are never killed within one deposit of everything: the cache lives in one of them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <signal.h>
#include <sstream>

#include <doctest/doctest.h>

#include "client/control_connection.h"
#include "tests/e2e/chaos_engine.h"
#include "tests/e2e/survival.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kNumEngines = 3;
constexpr const char* kTargets[] = {"engine", "larderd", "executor", "keeper"};
enum Target { kEngine, kLarderd, kExecutor, kKeeper };

int num_rounds() {
  const char* text = std::getenv("LARDER_CHAOS_ROUNDS");
  return text == nullptr ? 40 : std::max(1, std::atoi(text));
}

std::optional<protocol::DaemonStatus> status_of(const Node& node) {
  protocol::Connect hello;
  hello.tenant = "default";
  hello.role = "read";
  auto connection = ControlConnection::connect(node.socket(), hello, 2s);
  if (!connection) return std::nullopt;
  auto status = connection->call_for<protocol::DaemonStatus>(protocol::GetStatus{});
  return status.ok() ? std::optional(*status) : std::nullopt;
}

bool is_ready(const Node& node) {
  const auto status = status_of(node);
  return status && status->ready;
}

int64_t count_fds(int64_t pid) {
  return std::distance(std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd"),
                       std::filesystem::directory_iterator());
}

// What they are, for a message.
std::string list_fds(int64_t pid) {
  std::string list;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    std::error_code gone;
    list += std::filesystem::read_symlink(entry.path(), gone).string() + " ";
  }
  return list;
}

// Memory that is the process's own, without what it shares.
int64_t private_kib(int64_t pid) {
  std::istringstream status(read_file("/proc/" + std::to_string(pid) + "/status"));
  for (std::string word; status >> word;)
    if (word == "RssAnon:") {
      int64_t kib = 0;
      status >> kib;
      return kib;
    }
  return -1;
}

// How big the three processes are.
struct Sizes {
  int64_t fds[3];
  std::string fd_lists[3];
  int64_t kib[3];
  int64_t physical_bytes;
};

// The smallest of many looks: who asks for the pids is a client too, and is seen to go later.
Sizes sizes_of(Node& node) {
  constexpr int kLooks = 50;
  const auto status = status_of(node);
  REQUIRE(status.has_value());
  const int64_t pids[] = {node.larderd().pid(), node.keeper().pid(), status->executor_pid};
  Sizes sizes{};
  sizes.physical_bytes = status->physical_bytes;
  int looks = 0;
  eventually([&] {
    for (int i = 0; i < 3; ++i) {
      const int64_t fds = count_fds(pids[i]);
      if (looks > 0 && fds >= sizes.fds[i]) continue;
      sizes.fds[i] = fds;
      sizes.fd_lists[i] = list_fds(pids[i]);
      sizes.kib[i] = private_kib(pids[i]);
    }
    return ++looks == kLooks;
  });
  return sizes;
}

class Storm {
 public:
  Storm(Node& node, const Texts& texts, std::mt19937_64& random)
      : node_(node), texts_(texts), random_(random) {
    for (int slot = 0; slot < kNumEngines; ++slot) engines_.emplace_back(node, slot);
    printed_at_kill_.resize(kNumEngines);
    deaths_under_it_.resize(kNumEngines);
    printed_at_death_.resize(kNumEngines);
    seen_.resize(kNumEngines);
  }

  void round() {
    keep_writing();
    // Mostly some tokens lie between two kills, sometimes nothing does.
    const size_t bytes = draw(4) == 0 ? 0 : 1 + draw(24);
    await([&] { return progress() >= bytes; });
    let_all_get_on();
    strike(choose());
    for (size_t i = 0; i < engines_.size(); ++i) printed_at_kill_[i] = printed(i);
  }

  // Lets the engines come to their ends.
  void end() {
    await([&] {
      collect();
      return std::none_of(engines_.begin(), engines_.end(),
                          [](const Engine& engine) { return engine.runs(); });
    });
    await([&] { return is_ready(node_); });
  }

  int64_t num_texts() const { return num_texts_; }
  int64_t kills(int target) const { return kills_[target]; }

 private:
  size_t draw(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }

  void await(const std::function<bool()>& condition) {
    const bool came = eventually(
        [&] {
          collect();
          return condition();
        },
        60s);
    if (!came) MESSAGE(last_of_log());
    REQUIRE(came);
  }
  std::string last_of_log() const {
    constexpr size_t kShownBytes = 6000;
    const std::string log = node_.log();
    return log.substr(std::max(log.size(), kShownBytes) - kShownBytes);
  }

  void collect() {
    if (const auto code = node_.larderd().wait_exit(0ms)) {
      MESSAGE(last_of_log());
      FAIL("larderd has ended by itself, exit status ", *code);
    }
    for (Engine& engine : engines_) {
      if (!engine.runs()) continue;
      const auto problem = engine.collect(texts_, published_);
      if (!problem) continue;
      ++num_texts_;
      if (!problem->empty()) MESSAGE(last_of_log());
      REQUIRE_MESSAGE(problem->empty(), *problem);
    }
  }

  void keep_writing() {
    collect();
    for (Engine& engine : engines_)
      if (!engine.runs()) start(engine, next_job(&engine == &engines_.back()));
  }
  Job next_job(bool may_batch) {
    if (may_batch && draw(2) == 0)
      if (Job batch = texts_.draw_batch(random_); is_published(batch, published_)) return batch;
    return texts_.draw(random_);
  }
  void start(Engine& engine, const Job& job) {
    engine.start(job, published_);
    const auto i = static_cast<size_t>(&engine - engines_.data());
    printed_at_kill_[i] = printed_at_death_[i] = 0;
    deaths_under_it_[i] = 0;
    seen_[i] = {0, Clock::now()};
  }

  // An engine gives a call up after 10 s, which kills in quick succession may make of it: one that
  // has printed nothing for long is waited for. A batch prints at its end.
  void let_all_get_on() {
    constexpr auto kLong = 2s;
    for (size_t i = 0; i < engines_.size(); ++i) {
      const size_t bytes = printed(i);
      if (bytes != seen_[i].bytes) seen_[i] = {bytes, Clock::now()};
      if (Clock::now() - seen_[i].since < kLong) continue;
      await([&] { return printed(i) != bytes || !engines_[i].runs(); });
    }
  }

  size_t printed(size_t i) const { return engines_[i].runs() ? engines_[i].printed_bytes() : 0; }

  // Bytes since the last kill, all engines together; plenty when one has ended.
  size_t progress() {
    size_t bytes = 0;
    for (size_t i = 0; i < engines_.size(); ++i) {
      if (!engines_[i].runs()) return 1000;
      bytes += printed(i) - std::min(printed(i), printed_at_kill_[i]);
    }
    return bytes;
  }

  // A call that stood through three executors is answered UNAVAILABLE, by design: so no engine sees
  // a third one die before it has printed something.
  bool executor_may_die() {
    for (size_t i = 0; i < engines_.size(); ++i) {
      if (!engines_[i].runs() || engines_[i].job().execution == "in-process") continue;
      if (printed(i) > printed_at_death_[i]) deaths_under_it_[i] = 0;
      if (deaths_under_it_[i] == 2) return false;
    }
    return true;
  }
  void count_executor_death() {
    for (size_t i = 0; i < engines_.size(); ++i) {
      ++deaths_under_it_[i];
      printed_at_death_[i] = printed(i);
    }
  }

  Target choose() {
    constexpr Target kWeighted[] = {kEngine,  kEngine,   kEngine,   kLarderd, kLarderd,
                                    kLarderd, kExecutor, kExecutor, kKeeper};
    const Target target = kWeighted[draw(std::size(kWeighted))];
    return target == kExecutor && !executor_may_die() ? kLarderd : target;
  }

  void strike(Target target) {
    // Only a larderd that is ready has deposited everything, and only then may either of them go.
    if (keeper_is_new_ && (target == kLarderd || target == kKeeper)) {
      await([&] { return is_ready(node_); });
      keeper_is_new_ = false;
    }
    switch (target) {
      case kEngine: {
        Engine& engine = engines_[draw(engines_.size())];
        if (!engine.runs()) return;
        const Job job = engine.job();
        engine.kill();
        start(engine, job);
        break;
      }
      case kLarderd:
        node_.larderd().signal(SIGKILL);
        REQUIRE(node_.larderd().wait_exit(20s) == 128 + SIGKILL);
        node_.start_larderd();
        break;
      case kExecutor: {
        const auto status = status_of(node_);
        if (!status || status->executor_pid == 0) return;
        ::kill(static_cast<pid_t>(status->executor_pid), SIGKILL);
        count_executor_death();
        break;
      }
      case kKeeper:
        await([&] { return is_ready(node_); });
        node_.keeper().signal(SIGKILL);
        REQUIRE(node_.keeper().wait_exit(20s) == 128 + SIGKILL);
        node_.start_keeper();
        keeper_is_new_ = true;
        break;
    }
    ++kills_[target];
  }

  Node& node_;
  const Texts& texts_;
  std::mt19937_64& random_;
  std::vector<Engine> engines_;
  std::set<std::string> published_;
  // Per engine:
  std::vector<size_t> printed_at_kill_;
  std::vector<int> deaths_under_it_;  // of executors, since it has printed something
  std::vector<size_t> printed_at_death_;
  struct Seen {
    size_t bytes = 0;
    Clock::time_point since;
  };
  std::vector<Seen> seen_;
  bool keeper_is_new_ = false;
  int64_t num_texts_ = 0;
  int64_t kills_[4] = {};
};

void check_nothing_is_held(const Node& node, int64_t physical_bytes) {
  // larderctl's own is left; a session of status_of() that larderd died under is waited for until
  // its grace period is over.
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 1; }, 40s));
  const auto pools = node.ctl({"pools"});
  REQUIRE(pools.size() == 1);
  const auto group = pools[0]["groups"][0];
  INFO(group.dump());
  CHECK(group["open"] == 0);
  CHECK(group["published"] == 0);
  CHECK(group["quarantined"] == 0);
  CHECK(group["free"].get<int64_t>() + group["cached"].get<int64_t>() == group["capacity"]);
  CHECK(node.ctl({"status"})["physical_bytes"] == physical_bytes);
}

TEST_CASE("text goes on, byte for byte, while any process is killed at any moment") {
  constexpr int64_t kGrowthKib = 8 * 1024;
  std::mt19937_64 random = random_engine(1);
  std::printf("larder-chaos: seed %llu, %d rounds\n", static_cast<unsigned long long>(seed()),
              num_rounds());
  std::fflush(stdout);
  std::optional<Texts> texts;
  {
    const Node calm;
    texts.emplace(calm, read_file(std::string(LARDER_TEST_DATA) + "/../../README.md"), random);
  }
  const ConfigFile config("resume_grace_ms = 10000\n");
  Node node(config.options());
  Storm storm(node, *texts, random);
  // The pool is there and the processes have seen each kind of work before they are measured.
  for (int i = 0; i < 3; ++i) storm.round();
  storm.end();
  check_nothing_is_held(node, node.ctl({"status"})["physical_bytes"]);
  const Sizes before = sizes_of(node);
  const auto start = Clock::now();
  for (int i = 0; i < num_rounds(); ++i) storm.round();
  storm.end();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  check_nothing_is_held(node, before.physical_bytes);
  const Sizes after = sizes_of(node);
  for (int i = 0; i < 3; ++i) {
    INFO("process ", i, ": ", before.fds[i], " fds and ", before.kib[i], " KiB before, ",
         after.fds[i], " and ", after.kib[i], " after\n", before.fd_lists[i], "\n",
         after.fd_lists[i]);
    // A larderd that has recovered pools on a GPU has not loaded the driver, which has fds too.
    if (std::getenv("LARDER_TEST_DEVICE") != nullptr)
      CHECK(after.fds[i] <= before.fds[i]);
    else
      CHECK(after.fds[i] == before.fds[i]);
    CHECK(after.kib[i] < before.kib[i] + kGrowthKib);
  }
  std::printf("larder-chaos: %lld texts in %.1f s;", static_cast<long long>(storm.num_texts()),
              seconds);
  for (int target = 0; target < 4; ++target)
    std::printf(" %s killed %lld times%s", kTargets[target],
                static_cast<long long>(storm.kills(target)), target < 3 ? "," : "\n");
}

}  // namespace
}  // namespace larder::test
