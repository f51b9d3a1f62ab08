// larderctl: asks a running daemon, replays files of steps, and prepares what pools need.
//
// Exit codes: 0 done, 1 the daemon refused (replay: an expectation does not hold), 2 wrong usage
// (replay: a file that cannot be used), 3 no daemon answers.
#include <cstdio>
#include <exception>
#include <functional>
#include <string>

#include <CLI/CLI.hpp>

#include "client/ctl/calibrate.h"
#include "client/ctl/queries.h"
#include "client/ctl/render.h"
#include "client/ctl/replay/process_session.h"
#include "client/ctl/replay/replay_command.h"

namespace larder::ctl {
namespace {

constexpr int kExitRefused = 1;
constexpr int kExitUsage = 2;
constexpr int kExitUnreachable = 3;

struct Output {
  bool json = false;

  template <typename Value>
  int show(const Result<Value>& value) const {
    if (!value) return refuse(value.status());
    const std::string text = json ? to_json(*value).dump(2) + "\n" : to_text(*value);
    std::fputs(text.c_str(), stdout);
    return 0;
  }
  int done(const Status& status) const {
    if (!status.ok()) return refuse(status);
    if (json) std::puts("{}");
    return 0;
  }
  int refuse(const Status& status) const {
    if (json) std::puts(to_json(status).dump(2).c_str());
    std::fprintf(stderr, "larderctl: %s\n", status.to_string().c_str());
    const bool unreachable =
        status.code() == ErrorCode::kUnavailable || status.code() == ErrorCode::kDeadlineExceeded;
    return unreachable ? kExitUnreachable : kExitRefused;
  }
};

// What the commands that ask a daemon share.
struct CommonOptions {
  Target target;
  std::string format = "text";
  int64_t deadline_ms = 2000;
  CLI::Option* socket_option = nullptr;
  CLI::Option* deadline_option = nullptr;

  void add_to(CLI::App& app) {
    socket_option =
        app.add_option("--socket", target.socket_path,
                       "Control socket; default $LARDER_SOCKET, else /run/larder/larderd.sock");
    app.add_option("--tenant", target.tenant, "Tenant to connect as")->capture_default_str();
    app.add_option("--token", target.token, "The tenant's token");
    deadline_option =
        app.add_option("--deadline-ms", deadline_ms,
                       "Longest wait for each answer; replay: 60000 unless it is given")
            ->check(CLI::Range(1, 3'600'000))
            ->capture_default_str();
    app.add_option("--format", format, "text or json")
        ->check(CLI::IsMember({"text", "json"}))
        ->capture_default_str();
  }
};

struct ReplayCommand {
  CLI::App* app = nullptr;
  replay::ReplayOptions options;
  size_t only = 0;
  CLI::Option* only_option = nullptr;

  void add_to(CLI::App& parent) {
    app = parent.add_subcommand("replay", "Runs the steps of JSON files and checks what they say");
    app->add_option("files", options.files, "Files of steps (tests/cases/README.md)")->required();
    app->add_flag("--embedded", options.embedded,
                  "On a daemon of its own, which is stopped afterwards; the default when no socket "
                  "is named and nobody answers at the default path");
    app->add_option("--memory", options.memory, "Memory of the pools: host or cuda")
        ->check(CLI::IsMember({"host", "cuda"}))
        ->capture_default_str();
    app->add_option("--device", options.device, "UUID of the GPU for --memory cuda");
    only_option = app->add_option("--only", only, "Run to this step and report it alone");
    app->add_option("--memory-bytes", options.memory_bytes, "Memory of an embedded daemon")
        ->transform(CLI::AsSizeValue(false))
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
  }
  int run(const CommonOptions& common) {
    options.socket_path = common.target.socket_path;
    options.socket_given = common.socket_option->count() > 0;
    options.token = common.target.token;
    options.json = common.format == "json";
    if (only_option->count() > 0) options.only = only;
    if (common.deadline_option->count() > 0)
      options.deadline = std::chrono::milliseconds(common.deadline_ms);
    return replay::run_replay(options);
  }
};

struct CalibrateCommand {
  CLI::App* app = nullptr;
  std::string dump;
  std::string offsets;
  int64_t num_kv_heads = 0;
  int64_t num_layers = 0;

  void add_to(CLI::App& parent) {
    app = parent.add_subcommand("calibrate", "Writes the mean keys that centred pools subtract");
    app->add_option("dump", dump,
                    "safetensors file with keys \"k.LAYER\" [tokens, kv_heads, k_dim]")
        ->required();
    app->add_option("-o,--output", offsets, "Where the offsets go")->required();
    app->add_option("--kv-heads", num_kv_heads, "Refuse a dump with another number")
        ->check(CLI::PositiveNumber);
    app->add_option("--layers", num_layers, "Refuse a dump with another number")
        ->check(CLI::PositiveNumber);
  }
  int run(const CommonOptions& common) const {
    const auto made = calibrate(dump, offsets, num_kv_heads, num_layers);
    if (!made) {
      if (common.format == "json") std::puts(to_json(made.status()).dump(2).c_str());
      std::fprintf(stderr, "larderctl: %s\n", made.status().to_string().c_str());
      return kExitUsage;
    }
    const nlohmann::json figures = {{"layers", made->num_layers},
                                    {"kv_heads", made->num_kv_heads},
                                    {"k_dim", made->k_dim},
                                    {"tokens", made->num_tokens}};
    const std::string text = std::to_string(made->num_layers) + " layers, " +
                             std::to_string(made->num_kv_heads) + " KV heads of " +
                             std::to_string(made->k_dim) + ", means over " +
                             std::to_string(made->num_tokens) + " tokens: " + offsets;
    std::puts(common.format == "json" ? figures.dump(2).c_str() : text.c_str());
    return 0;
  }
};

// The commands that put one question to a running daemon.
struct Questions {
  CLI::App* status = nullptr;
  CLI::App* pools = nullptr;
  CLI::App* sessions = nullptr;
  CLI::App* tenants = nullptr;
  CLI::App* quota = nullptr;
  CLI::App* resize = nullptr;
  CLI::App* evicting = nullptr;
  CLI::App* destroy = nullptr;
  std::string pool_name;
  std::string group;
  int64_t num_blocks = 0;
  protocol::SetQuota new_quota;

  void add_to(CLI::App& app) {
    status = app.add_subcommand("status", "The daemon, its processes and its memory");
    pools = app.add_subcommand("pools", "Pools, their blocks and their bytes");
    sessions = app.add_subcommand("sessions", "Who is connected and what they hold");
    app.add_subcommand("capabilities", "Which op takes which formats and dims, on what");
    tenants = app.add_subcommand("tenants", "Tenants, their quotas and what they have taken");
    quota = app.add_subcommand("quota", "Sets a tenant's quota, until the daemon's next start");
    quota->add_option("tenant", new_quota.tenant, "Name of the tenant")->required();
    add_bytes(quota, "guaranteed", new_quota.guaranteed_bytes, "Bytes kept for it");
    add_bytes(quota, "maximum", new_quota.maximum_bytes, "Bytes it may take; 0: no maximum");
    resize = app.add_subcommand("resize", "Grows or shrinks a pool, in whole segments");
    add_pool(resize);
    resize->add_option("blocks", num_blocks, "How many it is to have")->required();
    resize->add_option("--group", group, "Name or number of the group; else the first");
    evicting = app.add_subcommand("evict", "Evicts cached prefixes of a pool");
    add_pool(evicting);
    evicting->add_option("blocks", num_blocks, "How many cached blocks at most")->required();
    destroy = app.add_subcommand("destroy-pool", "Frees a pool that nobody has open");
    add_pool(destroy);
  }
  void add_pool(CLI::App* command) {
    command->add_option("pool", pool_name, "Name of the pool in the tenant")->required();
  }
  static void add_bytes(CLI::App* command, const char* name, int64_t& bytes, const char* help) {
    command->add_option(name, bytes, help)->required()->transform(CLI::AsSizeValue(false));
  }
  int ask(const Target& target, const Output& output) const {
    auto connection = connect(target);
    if (!connection) return output.refuse(connection.status());
    if (*status)
      return output.show(connection->call_for<protocol::DaemonStatus>(protocol::GetStatus{}));
    if (*pools) return output.show(list_pools(*connection));
    if (*sessions) return output.show(list_sessions(*connection));
    if (*tenants) return output.show(list_tenants(*connection));
    if (*quota) return output.done(connection->call_for<protocol::Done>(new_quota).status());
    if (*resize) return output.show(resize_pool(*connection, target, pool_name, group, num_blocks));
    if (*evicting) return output.show(evict(*connection, target, pool_name, num_blocks));
    if (*destroy) return output.done(destroy_pool(*connection, target, pool_name));
    return output.show(connection->call_for<protocol::Capabilities>(protocol::GetCapabilities{}));
  }
};

int run(int argc, char** argv) {
  CLI::App app("Asks a running larderd, and replays files of steps.", "larderctl");
  app.require_subcommand(1);
  app.fallthrough();
  CommonOptions common;
  Questions questions;
  ReplayCommand replay;
  CalibrateCommand calibration;
  common.add_to(app);
  questions.add_to(app);
  replay.add_to(app);
  calibration.add_to(app);
  // A session of a replay in its own process; an empty group keeps it out of the help.
  const auto* session = app.add_subcommand(replay::kSessionCommand)->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (*session) return replay::serve_session(OwnFd(replay::kSessionDescriptor));
  if (*replay.app) return replay.run(common);
  if (*calibration.app) return calibration.run(common);
  common.target.deadline = std::chrono::milliseconds(common.deadline_ms);
  return questions.ask(common.target, Output{common.format == "json"});
}

}  // namespace
}  // namespace larder::ctl

int main(int argc, char** argv) {
  try {
    return larder::ctl::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "larderctl: %s\n", error.what());
    return 3;
  }
}
