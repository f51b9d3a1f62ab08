#include "client/ctl/replay/runner.h"

#include <algorithm>
#include <chrono>

#include "client/ctl/replay/local_session.h"
#include "client/ctl/replay/process_session.h"
#include "client/ctl/replay/references.h"
#include "larder/system_error.h"

namespace larder::replay {
namespace {

using std::chrono::steady_clock;

double milliseconds_since(steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
}

std::vector<std::string> tenants_of(const ReplayFile& file) {
  std::set<std::string> tenants = {"default"};
  for (const Step& step : file.steps)
    if (const auto* open = std::get_if<OpenSession>(&step.operation)) tenants.insert(open->tenant);
  return {tenants.begin(), tenants.end()};
}

bool hold(const std::vector<Finding>& findings) {
  return std::all_of(findings.begin(), findings.end(),
                     [](const Finding& finding) { return finding.holds; });
}

}  // namespace

Result<std::unique_ptr<EmbeddedNode>> start_node(const ReplayFile& file, int64_t memory_bytes,
                                                 const std::string& device) {
  return EmbeddedNode::start(tenants_of(file), memory_bytes, device);
}

void Runner::run() {
  for (const Step& step : file_.steps) {
    if (settings_.only && step.number > *settings_.only) break;
    const StepReport report = run_step(step);
    if (!settings_.only || step.number == *settings_.only) observe_(report);
  }
  sessions_.clear();
}

StepReport Runner::run_step(const Step& step) {
  StepReport report;
  report.step = &step;
  if (const auto reason = missing(step)) {
    report.verdict = reason->first ? Verdict::kSkipped : Verdict::kFail;
    report.reason = reason->second;
    if (reason->first) note_skipped(step);
    return report;
  }
  const auto begin = steady_clock::now();
  try {
    report.outcome = execute(step);
  } catch (const SystemError& error) {
    report.outcome = refused(ErrorCode::kInternal, error.what());
  }
  report.milliseconds = milliseconds_since(begin);
  const Status& status = report.outcome.status;
  if (step.may_be_unsupported && status.code() == ErrorCode::kUnsupported) {
    report.verdict = Verdict::kSkipped;
    report.reason = status.to_string();
    note_skipped(step);
    return report;
  }
  if (step.expect) {
    report.findings = judge(*step.expect, report.outcome, results_, judged_on());
    report.verdict = hold(report.findings) ? Verdict::kOk : Verdict::kFail;
  } else if (!status.ok()) {
    report.verdict = Verdict::kFail;
    report.reason = status.to_string();
  }
  if (status.ok()) note_result(step, report.outcome);
  return report;
}

std::optional<std::pair<bool, std::string>> Runner::missing(const Step& step) const {
  if (step.op != "open_pool" && skipped_pools_.contains({step.session, step.pool}))
    return std::pair(true, "pool \"" + step.pool + "\" was skipped");
  for (const std::string& name : step.references) {
    if (results_.contains(name)) continue;
    if (skipped_results_.contains(name)) return std::pair(true, "\"" + name + "\" was skipped");
    return std::pair(false, "there is no result \"" + name + "\": its step has failed");
  }
  return std::nullopt;
}

void Runner::note_skipped(const Step& step) {
  if (!step.as.empty()) skipped_results_.insert(step.as);
  if (step.op == "open_pool") skipped_pools_.emplace(step.session, step.pool);
}

void Runner::note_result(const Step& step, const Outcome& outcome) {
  if (step.op == "open_pool") {
    skipped_pools_.erase({step.session, step.pool});
    const Value* created = outcome.value.part("created");
    if (created != nullptr && number_at(*created, 0) == 1)
      created_pools_.emplace(sessions_.at(step.session).tenant, step.pool);
  }
  if (!step.pool.empty()) note_generations(step, outcome.value);
  if (!step.as.empty()) results_[step.as] = outcome.value;
}

void Runner::note_generations(const Step& step, const Value& value) {
  Generations& generations = generations_of(step);
  const auto note = [&](const std::string& group, const Blocks& blocks) {
    for (const BlockHandle& block : blocks)
      if (block.id >= 0) generations[{group, block.id}] = block.generation;
  };
  const bool is_of_units = std::holds_alternative<Publish>(step.operation) ||
                           std::holds_alternative<Lookup>(step.operation);
  const auto* parts = std::get_if<Parts>(&value.data);
  if (!is_of_units || parts == nullptr || value.part("block") || value.part("blocks")) {
    if (const Blocks* blocks = blocks_of(value, "")) note(step.group_name, *blocks);
    return;
  }
  for (const Part& part : *parts)
    if (const auto* blocks = std::get_if<Blocks>(&part.value.data)) note(part.name, *blocks);
}

Generations& Runner::generations_of(const Step& step) {
  const auto session = sessions_.find(step.session);
  const std::string tenant = session == sessions_.end() ? "" : session->second.tenant;
  return generations_[{tenant, step.pool}];
}

Outcome Runner::execute(const Step& step) {
  if (const auto* open = std::get_if<OpenSession>(&step.operation))
    return open_session(step, *open);
  if (std::holds_alternative<KillSession>(step.operation)) return kill_session(step);
  if (std::holds_alternative<RestartDaemon>(step.operation) ||
      std::holds_alternative<KillExecutor>(step.operation) ||
      std::holds_alternative<KillKeeper>(step.operation))
    return execute_on_node(step);
  if (!sessions_.contains(step.session)) {
    if (ended_sessions_.contains(step.session) || step.session != "main")
      return refused(ErrorCode::kNotFound, "session \"" + step.session + "\" is not open");
    if (Outcome opened = open_session(step, OpenSession{}); !opened.status.ok()) return opened;
  }
  if (const auto* until = std::get_if<Wait>(&step.operation)) return wait(step, *until);
  return run_in_session(step);
}

Outcome Runner::execute_on_node(const Step& step) {
  if (settings_.node == nullptr)
    return refused(ErrorCode::kUnsupported, step.op +
                                                " is for a daemon of the replay's own: it "
                                                "needs --embedded");
  if (std::holds_alternative<KillExecutor>(step.operation))
    return {settings_.node->kill_executor(), {}};
  if (std::holds_alternative<KillKeeper>(step.operation))
    return {settings_.node->kill_keeper(), {}};
  const auto milliseconds =
      settings_.node->restart_daemon(std::get<RestartDaemon>(step.operation).is_kill);
  if (!milliseconds) return {milliseconds.status(), {}};
  return {{}, {*milliseconds}};
}

Outcome Runner::open_session(const Step& step, const OpenSession& open) {
  sessions_.erase(step.session);
  SessionSettings settings;
  settings.socket_path = settings_.socket_path;
  settings.tenant = open.tenant;
  settings.token = settings_.token;
  settings.deadline = settings_.deadline;
  settings.execution = open.is_process ? Execution::kInProcess : Execution::kOnRequest;
  settings.device = settings_.device;
  settings.is_embedded = settings_.node != nullptr;
  settings.folder = std::filesystem::path(file_.path).parent_path().string();
  std::unique_ptr<Session> session;
  if (open.is_process) {
    auto started = ProcessSession::start(settings);
    if (!started) return {started.status(), {}};
    session = std::move(*started);
  } else {
    auto opened = LocalSession::open(settings);
    if (!opened) return {opened.status(), {}};
    session = std::move(*opened);
  }
  sessions_[step.session] = {open.tenant, std::move(session)};
  ended_sessions_.erase(step.session);
  return {};
}

Outcome Runner::kill_session(const Step& step) {
  const auto found = sessions_.find(step.session);
  if (found == sessions_.end())
    return refused(ErrorCode::kNotFound, "session \"" + step.session + "\" is not open");
  if (auto* process = dynamic_cast<ProcessSession*>(found->second.session.get())) process->kill();
  sessions_.erase(found);
  ended_sessions_.insert(step.session);
  return {};
}

Outcome Runner::wait(const Step& step, const Wait& wait) {
  const auto begin = steady_clock::now();
  const auto deadline = begin + std::chrono::milliseconds(wait.limit_ms);
  while (true) {
    Outcome stats = run_in_session(step);
    if (!stats.status.ok()) return stats;
    const std::vector<Finding> findings = judge(wait.until, stats, results_, judged_on());
    if (hold(findings)) return {{}, {milliseconds_since(begin)}};
    if (steady_clock::now() > deadline) {
      std::string text;
      for (const Finding& finding : findings)
        if (!finding.holds) text += "; " + finding.part + ": " + finding.text;
      return refused(ErrorCode::kDeadlineExceeded,
                     "after " + std::to_string(wait.limit_ms) + " ms" + text);
    }
    pause_between_looks();
  }
}

Outcome Runner::run_in_session(const Step& step) {
  return sessions_.at(step.session).session->run(step, {results_, generations_of(step)});
}

}  // namespace larder::replay
