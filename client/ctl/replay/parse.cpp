#include "client/ctl/replay/parse.h"

#include "client/file_reader.h"

namespace larder::replay {
namespace {

// Builds the document and keeps watch: nesting is limited, and no object has a key twice (of which
// JSON libraries silently keep one).
class Document {
 public:
  Result<json> parse(std::string_view text) {
    json document;
    try {
      document = json::parse(text, [this](int depth, json::parse_event_t event, json& parsed) {
        return watch(depth, event, parsed);
      });
    } catch (const json::exception& error) {
      if (!mistake_.empty()) return Status(ErrorCode::kInvalidArgument, mistake_);
      return Status(ErrorCode::kInvalidArgument, std::string("is not JSON: ") + error.what());
    }
    if (!mistake_.empty()) return Status(ErrorCode::kInvalidArgument, mistake_);
    return document;
  }

 private:
  bool watch(int depth, json::parse_event_t event, const json& parsed) {
    if (!mistake_.empty()) return false;
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (static_cast<size_t>(depth) >= kMaxJsonDepth) {
        mistake_ = "is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels";
        return false;
      }
      if (event == Event::object_start) keys_.emplace_back();
    } else if (event == Event::object_end) {
      keys_.pop_back();
    } else if (event == Event::key && !keys_.empty() &&
               !keys_.back().insert(parsed.get<std::string>()).second) {
      mistake_ = "has the key " + shown(parsed) + " twice in one object";
      return false;
    }
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of the objects that are open
  std::string mistake_;
};

Status refuse(const std::filesystem::path& path, const std::string& sentence) {
  return {ErrorCode::kInvalidArgument, path.string() + ": " + sentence};
}

std::string step_title(const json& source, size_t number) {
  std::string title = "step " + std::to_string(number);
  if (source.is_object() && source.contains("do") && source["do"].is_string()) {
    const std::string text = shown(source["do"]);
    title += " (" + text.substr(1, text.size() - 2) + ")";
  }
  return title + ": ";
}

}  // namespace

Result<ReplayFile> parse_replay(std::string_view text, const std::filesystem::path& path) {
  if (static_cast<int64_t>(text.size()) > kMaxFileBytes)
    return refuse(path, "has " + std::to_string(text.size()) + " bytes, at most " +
                            std::to_string(kMaxFileBytes) + " are read");
  const Result<json> document = Document().parse(text);
  if (!document) return refuse(path, document.status().message());
  Problem problem;
  Fields fields(Cursor(*document, "", problem));
  ReplayFile file;
  file.path = path.string();
  file.name = fields.text("name", path.string());
  (void)fields.integer("version", 1, 1, 1);
  (void)fields.text("comment", "");
  const Cursor steps = fields.need("steps");
  const size_t count = steps.list_size(kMaxSteps);
  if (steps.value().is_array() && count == 0) steps.refuse("is empty, expected one step or more");
  fields.finish();
  if (problem.found()) return refuse(path, problem.text());
  Scope scope;
  const std::filesystem::path folder = path.parent_path();
  for (size_t i = 0; i < count; ++i) {
    const json& source = steps.value()[i];
    file.steps.push_back(parse_step(source, i + 1, folder, &scope, problem));
    if (problem.found()) return refuse(path, step_title(source, i + 1) + problem.text());
  }
  return file;
}

Result<ReplayFile> read_replay(const std::filesystem::path& path) {
  auto reader = FileReader::open(path);
  if (!reader) return reader.status();
  if (reader->size_bytes() > kMaxFileBytes)
    return refuse(path, "has " + std::to_string(reader->size_bytes()) + " bytes, at most " +
                            std::to_string(kMaxFileBytes) + " are read");
  std::string text(static_cast<size_t>(reader->size_bytes()), '\0');
  if (Status status = reader->read(0, text); !status.ok()) return status;
  return parse_replay(text, path);
}

}  // namespace larder::replay
