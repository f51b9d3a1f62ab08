#include "client/ctl/replay/report.h"

#include <cstdio>

#include "client/ctl/replay/fields.h"

namespace larder::replay {
namespace {

const char* word(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kFail:
      return "FAIL";
    case Verdict::kSkipped:
      return "skipped";
  }
  return "";
}

// What came of a step that expects nothing, where it is short.
std::string brief_value(const Value& value) {
  constexpr size_t kMaxBytes = 160;
  if (const auto* parts = std::get_if<Parts>(&value.data)) {
    std::string text;
    for (const Part& part : *parts) {
      const std::string inner = brief_value(part.value);
      if (!inner.empty()) text += (text.empty() ? "" : ", ") + part.name + " " + inner;
    }
    return text;
  }
  constexpr size_t kMaxElements = 16;
  if (size_of(value) == 0 || size_of(value) > kMaxElements)
    return size_of(value) == 0 ? "" : std::to_string(size_of(value)) + " elements";
  std::string text = to_json(value).dump();
  if (const auto* blocks = std::get_if<Blocks>(&value.data)) {
    text = "blocks";
    for (const BlockHandle& block : *blocks) text += " " + std::to_string(block.id);
  }
  if (text.size() <= kMaxBytes) return text;
  text.resize(kMaxBytes);
  return text += "...";
}

std::string findings_text(const StepReport& report) {
  std::string text;
  // Those that do not hold come first.
  for (const bool holds : {false, true})
    for (const Finding& finding : report.findings) {
      if (finding.holds != holds) continue;
      if (!text.empty()) text += "; ";
      if (!finding.part.empty()) text += finding.part + ": ";
      text += finding.text;
    }
  return text;
}

}  // namespace

std::string to_text(const StepReport& report) {
  const Step& step = *report.step;
  std::string detail = report.reason.empty() ? findings_text(report) : report.reason;
  if (detail.empty()) detail = brief_value(report.outcome.value);
  const std::string title =
      step.op + (step.session == "main" ? "" : " in " + shown(json(step.session)));
  char head[64];
  std::snprintf(head, sizeof head, "%-7s %4zu ", word(report.verdict), step.number);
  std::string line = head + title;
  if (!detail.empty()) line += ": " + detail;
  return line;
}

json to_json(const StepReport& report) {
  const Step& step = *report.step;
  json object = {{"step", step.number},
                 {"do", step.op},
                 {"session", step.session},
                 {"verdict", word(report.verdict)},
                 {"milliseconds", report.milliseconds}};
  if (!step.as.empty()) object["as"] = step.as;
  if (!report.reason.empty()) object["reason"] = report.reason;
  const Status& status = report.outcome.status;
  if (!status.ok())
    object["error"] = {{"code", error_code_name(status.code())}, {"message", status.message()}};
  if (report.outcome.value.data.index() != 0) object["result"] = to_json(report.outcome.value);
  json checks = json::array();
  for (const Finding& finding : report.findings) {
    json check = {{"holds", finding.holds}, {"text", finding.text}};
    if (!finding.part.empty()) check["part"] = finding.part;
    if (finding.largest_error) check["largest_error"] = number_json(*finding.largest_error);
    if (finding.at) check["at"] = *finding.at;
    checks.push_back(std::move(check));
  }
  if (!checks.empty()) object["checks"] = std::move(checks);
  return object;
}

void Totals::add(Verdict verdict) {
  (verdict == Verdict::kOk ? num_ok : verdict == Verdict::kFail ? num_failed : num_skipped) += 1;
}

std::string Totals::to_text() const {
  return std::to_string(num_ok) + " ok, " + std::to_string(num_failed) + " FAIL, " +
         std::to_string(num_skipped) + " skipped";
}

}  // namespace larder::replay
