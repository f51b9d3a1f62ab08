#include "client/ctl/replay/replay_command.h"

#include <cstdio>

#include "allocator/memory_devices.h"
#include "client/ctl/queries.h"
#include "client/ctl/replay/report.h"

namespace larder::replay {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUnusable = 2;
constexpr int kExitNoDaemon = 3;
constexpr auto kProbeLimit = std::chrono::milliseconds(1000);

void complain(const std::string& text) { std::fprintf(stderr, "larderctl: %s\n", text.c_str()); }

void print_line(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

// Names in files are anybody's: nothing of them steers the terminal, neither by C0 controls nor by
// C1 ones (0xC2 0x80 to 0xC2 0x9F).
std::string harmless(std::string text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7F) text[i] = '?';
    const bool follows_c2 = i > 0 && static_cast<unsigned char>(text[i - 1]) == 0xC2;
    if (follows_c2 && byte >= 0x80 && byte < 0xA0) text[i - 1] = text[i] = '?';
  }
  return text;
}

void print_text(const std::string& text) { print_line(harmless(text)); }

int refuse(const ReplayOptions& options, const std::string& file, const Status& status, int exit) {
  if (options.json) {
    const json error = {{"code", error_code_name(status.code())}, {"message", status.message()}};
    json object = {{"error", error}};
    if (!file.empty()) object["file"] = file;
    print_line(object.dump(-1, ' ', false, json::error_handler_t::replace));
  }
  complain(exit == kExitUnusable ? status.message() : status.to_string());
  return exit;
}

bool somebody_answers(const ReplayOptions& options) {
  ctl::Target target;
  target.socket_path = options.socket_path;
  target.token = options.token;
  target.deadline = kProbeLimit;
  const auto connection = ctl::connect(target);
  if (connection.ok()) return true;
  const ErrorCode code = connection.status().code();
  return code != ErrorCode::kUnavailable && code != ErrorCode::kNotFound;
}

// Pools outlive sessions; those that the file made would meet the next run.
void destroy_pools(const ReplayOptions& options, const Runner& runner) {
  for (const auto& [tenant, name] : runner.created_pools()) {
    ctl::Target target;
    target.socket_path = options.socket_path;
    target.tenant = tenant;
    target.token = options.token;
    Status status;
    if (auto connection = ctl::connect(target)) {
      status = ctl::destroy_pool(*connection, target, name);
    } else {
      status = connection.status();
    }
    if (!status.ok() && status.code() != ErrorCode::kNotFound)
      complain(harmless(std::string("pool \"")
                            .append(name)
                            .append("\" of tenant \"")
                            .append(tenant)
                            .append("\" stays: ")
                            .append(status.to_string())));
  }
}

class Printer {
 public:
  Printer(const ReplayFile& file, bool as_json) : file_(file), as_json_(as_json) {
    if (!as_json_) print_text(file_.path + ": " + file_.name);
  }
  void step(const StepReport& report) {
    totals_.add(report.verdict);
    if (as_json_) {
      steps_.push_back(to_json(report));
    } else {
      print_text(to_text(report));
    }
  }
  // `trouble`: of the daemon, not of a step.
  void finish(const Status& trouble) const {
    if (!as_json_) {
      print_text(file_.path + ": " + totals_.to_text());
      return;
    }
    json object = {{"file", file_.path},
                   {"name", file_.name},
                   {"ok", totals_.num_ok},
                   {"failed", totals_.num_failed},
                   {"skipped", totals_.num_skipped},
                   {"steps", steps_}};
    if (!trouble.ok())
      object["error"] = {{"code", error_code_name(trouble.code())}, {"message", trouble.message()}};
    print_line(object.dump(-1, ' ', false, json::error_handler_t::replace));
  }
  const Totals& totals() const { return totals_; }

 private:
  const ReplayFile& file_;
  bool as_json_;
  Totals totals_;
  json steps_ = json::array();
};

// One file; an embedded daemon lives as long as that.
int run_file(const ReplayOptions& options, const std::string& device, bool embedded,
             const ReplayFile& file) {
  std::unique_ptr<EmbeddedNode> node;
  if (embedded) {
    auto started = start_node(file, options.memory_bytes, device);
    if (!started) return refuse(options, file.path, started.status(), kExitNoDaemon);
    node = std::move(*started);
  }
  Printer printer(file, options.json);
  RunSettings settings;
  settings.socket_path = node ? node->socket_path() : options.socket_path;
  settings.token = options.token;
  settings.deadline = options.deadline;
  settings.device = device;
  settings.node = node.get();
  settings.only = options.only;
  Runner runner(file, settings, [&](const StepReport& report) { printer.step(report); });
  runner.run();
  Status trouble;
  if (node) {
    trouble = node->stop();
    if (!trouble.ok()) complain(trouble.to_string());
  } else {
    destroy_pools(options, runner);
  }
  printer.finish(trouble);
  return printer.totals().num_failed > 0 || !trouble.ok() ? kExitFailed : 0;
}

Status check_options(const ReplayOptions& options) {
  if (options.socket_given && options.embedded)
    return {ErrorCode::kInvalidArgument, "--socket and --embedded exclude each other"};
  if (options.memory != "cuda" && !options.device.empty())
    return {ErrorCode::kInvalidArgument,
            "--device " + options.device + " names a GPU, but --memory is " + options.memory};
  if (options.only && options.files.size() > 1)
    return {ErrorCode::kInvalidArgument, "--only names a step of one file, " +
                                             std::to_string(options.files.size()) + " are given"};
  return {};
}

// The device whose memory the pools are to be.
Result<std::string> find_device(const ReplayOptions& options) {
  MemoryDevices devices;
  if (options.memory != "cuda") return kHostDevice;
  Result<std::string> device = devices.resolve(options.device.empty() ? "auto" : options.device);
  if (device && *device == kHostDevice)
    return Status(ErrorCode::kUnavailable, "--memory cuda: " + devices.why_no_gpu());
  return device;
}

}  // namespace

int run_replay(const ReplayOptions& options) {
  if (Status status = check_options(options); !status.ok())
    return refuse(options, "", status, kExitUnusable);
  const Result<std::string> device = find_device(options);
  if (!device) return refuse(options, "", device.status(), kExitUnusable);
  std::vector<ReplayFile> files;
  for (const std::string& path : options.files) {
    auto file = read_replay(path);
    if (!file) return refuse(options, path, file.status(), kExitUnusable);
    if (options.only && (*options.only < 1 || *options.only > file->steps.size()))
      return refuse(options, path,
                    {ErrorCode::kInvalidArgument,
                     path + ": --only is " + std::to_string(*options.only) +
                         ", the file has steps 1 to " + std::to_string(file->steps.size())},
                    kExitUnusable);
    files.push_back(std::move(*file));
  }
  const bool embedded = options.embedded || (!options.socket_given && !somebody_answers(options));
  int exit = 0;
  size_t num_failed = 0;
  for (const ReplayFile& file : files) {
    const int status = run_file(options, *device, embedded, file);
    exit = std::max(exit, status);
    num_failed += status != 0 ? 1 : 0;
  }
  if (!options.json && files.size() > 1)
    print_line(std::to_string(files.size()) + " files, " + std::to_string(num_failed) +
               " with failures");
  return exit;
}

}  // namespace larder::replay
