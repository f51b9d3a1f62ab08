// larderctl: asks a running daemon.
//
// Exit codes: 0 done, 1 the daemon refused, 2 wrong usage, 3 no daemon answers.
#include <cstdio>
#include <exception>
#include <functional>
#include <string>

#include <CLI/CLI.hpp>

#include "client/ctl/queries.h"
#include "client/ctl/render.h"

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

int run(int argc, char** argv) {
  CLI::App app("Asks a running larderd.", "larderctl");
  app.require_subcommand(1);
  app.fallthrough();
  Target target;
  std::string format = "text";
  std::string pool_name;
  int64_t deadline_ms = target.deadline.count();
  app.add_option("--socket", target.socket_path,
                 "Control socket; default $LARDER_SOCKET, else /run/larder/larderd.sock");
  app.add_option("--tenant", target.tenant, "Tenant to connect as")->capture_default_str();
  app.add_option("--token", target.token, "The tenant's token");
  app.add_option("--deadline-ms", deadline_ms, "Longest wait for each answer")
      ->check(CLI::Range(1, 3'600'000))
      ->capture_default_str();
  app.add_option("--format", format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  auto* status = app.add_subcommand("status", "The daemon, its processes and its memory");
  auto* pools = app.add_subcommand("pools", "Pools, their blocks and their bytes");
  auto* sessions = app.add_subcommand("sessions", "Who is connected and what they hold");
  app.add_subcommand("capabilities", "Which op takes which formats and dims, on what");
  auto* destroy = app.add_subcommand("destroy-pool", "Frees a pool that nobody has open");
  destroy->add_option("pool", pool_name, "Name of the pool in the tenant")->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  target.deadline = std::chrono::milliseconds(deadline_ms);
  const Output output{format == "json"};
  auto connection = connect(target);
  if (!connection) return output.refuse(connection.status());
  if (*status)
    return output.show(connection->call_for<protocol::DaemonStatus>(protocol::GetStatus{}));
  if (*pools) return output.show(list_pools(*connection));
  if (*sessions) return output.show(list_sessions(*connection));
  if (*destroy) return output.done(destroy_pool(*connection, target, pool_name));
  return output.show(connection->call_for<protocol::Capabilities>(protocol::GetCapabilities{}));
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
