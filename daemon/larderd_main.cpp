// larderd: reads the configuration and joins the parts.
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>

#include <CLI/CLI.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "daemon/config.h"
#include "daemon/http.h"
#include "daemon/keeper_client.h"
#include "daemon/mps.h"
#include "daemon/recovery.h"
#include "daemon/service.h"
#include "daemon/socket_file.h"
#include "larder/system_error.h"
#include "protocol/channel.h"

namespace larder::daemon {
namespace {

namespace asio = boost::asio;

// Without free descriptors accept fails at once, again and again; a pause lets some come back.
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
constexpr auto kKeeperPatience = std::chrono::seconds(2);
constexpr auto kKeeperPause = std::chrono::milliseconds(2);

int fail(const Status& status) {
  std::fprintf(stderr, "larderd: %s\n", status.to_string().c_str());
  return 1;
}

std::string executor_path(const Config& config) {
  if (!config.executor_path.empty()) return config.executor_path;
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "larder-executor";
}

class Acceptor {
 public:
  Acceptor(asio::io_context& loop, int listener, Service& service)
      : listener_(loop, duplicate(listener).release()), pause_(loop), service_(service) {
    wait();
  }

 private:
  void wait() {
    listener_.async_wait(asio::posix::stream_descriptor::wait_read,
                         [this](const boost::system::error_code& error) {
                           if (!error) accept();
                         });
  }
  void accept() {
    OwnFd socket(
        ::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      try {
        protocol::prepare_socket(socket.get());
        service_.accept(std::move(socket));
      } catch (const std::runtime_error& error) {  // ours and Asio's: only this client is lost
        spdlog::warn("event=accept_failed error=\"{}\"", error.what());
      }
      return wait();
    }
    if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS) return wait();
    spdlog::warn("event=accept_paused errno={}", errno);
    pause_.expires_after(kAcceptPause);
    pause_.async_wait([this](const boost::system::error_code& error) {
      if (!error) wait();
    });
  }

  asio::posix::stream_descriptor listener_;
  asio::steady_timer pause_;
  Service& service_;
};

// The first signal drains, the second ends at once.
class Shutdown {
 public:
  Shutdown(asio::io_context& loop, asio::signal_set& signals, Service& service,
           std::chrono::milliseconds grace)
      : loop_(loop), signals_(signals), timer_(loop), service_(service), grace_(grace) {
    wait();
  }
  int exit_code() const { return forced_ ? 1 : 0; }

 private:
  void wait() {
    signals_.async_wait([this](const boost::system::error_code& error, int signal) {
      if (error) return;
      if (draining_) {
        forced_ = true;
        return loop_.stop();
      }
      draining_ = true;
      spdlog::info("event=shutting_down signal={} grace_ms={}", signal, grace_.count());
      timer_.expires_after(grace_);
      timer_.async_wait([this](const boost::system::error_code& timer_error) {
        if (!timer_error) loop_.stop();
      });
      service_.drain([this] { loop_.stop(); });
      wait();
    });
  }

  asio::io_context& loop_;
  asio::signal_set& signals_;
  asio::steady_timer timer_;
  Service& service_;
  std::chrono::milliseconds grace_;
  bool draining_ = false;
  bool forced_ = false;
};

// The last larderd may still be on its way out: one that is told to stop serves for a while.
Result<KeeperClient> connect_keeper(const Config& config) {
  const auto until = std::chrono::steady_clock::now() + kKeeperPatience +
                     std::chrono::milliseconds(config.shutdown_grace_ms);
  while (true) {
    auto keeper = KeeperClient::connect(config.keeper_socket_path);
    if (keeper.ok() || keeper.status().code() != ErrorCode::kBusy ||
        std::chrono::steady_clock::now() >= until)
      return keeper;
    std::this_thread::sleep_for(kKeeperPause);
  }
}

// What the keeper holds is left as it is: another build may know better.
int refuse(const Status& status) {
  std::fprintf(stderr,
               "larderd: %s\nlarderd: the cache is left with the keeper; to begin an empty one, "
               "restart larder-keeper\n",
               status.to_string().c_str());
  return 1;
}

int run(const Config& config) {
  asio::io_context loop(1);
  // Before anything is there that would have to be cleaned up.
  asio::signal_set signals(loop, SIGTERM, SIGINT);
  auto keeper = connect_keeper(config);
  if (!keeper) return fail(keeper.status());
  auto recovery = read_keeper(*keeper);
  if (!recovery) return refuse(recovery.status());
  auto socket = SocketFile::bind(config.socket_path, 0660, config.socket_group);
  if (!socket) return fail(socket.status());

  Service service(loop, config, std::move(*keeper), executor_path(config));
  if (Status status = service.recover(std::move(*recovery)); !status.ok()) return refuse(status);
  std::unique_ptr<HttpServer> http;
  if (config.http_port >= 0) {
    http = std::make_unique<HttpServer>(
        loop, config.http_address, static_cast<uint16_t>(config.http_port),
        HttpServer::Pages{[&] { return service.metrics_text(); },
                          [&] { return service.not_ready(); }, [&] { return service.not_live(); }});
    spdlog::info("event=http_serving address={} port={}", config.http_address, http->port());
  }
  service.start();
  Acceptor acceptor(loop, socket->fd(), service);
  Shutdown shutdown(loop, signals, service, std::chrono::milliseconds(config.shutdown_grace_ms));
  spdlog::info("event=serving socket={} pid={}", config.socket_path, ::getpid());
  loop.run();
  return shutdown.exit_code();
}

void prepare_process(const Config& config) {
  auto logger = std::make_shared<spdlog::logger>("larderd",
                                                 std::make_shared<spdlog::sinks::stderr_sink_st>());
  spdlog::set_default_logger(logger);
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e %n %l %v");
  spdlog::set_level(spdlog::level::from_str(config.log_level));
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGHUP, SIG_IGN);
  stay_out_of_mps();
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

}  // namespace
}  // namespace larder::daemon

int main(int argc, char** argv) {
  using larder::daemon::Config;
  CLI::App app("The KV-cache daemon of one node.", "larderd");
  std::string config_path;
  Config overrides;
  app.add_option("--config", config_path, "TOML file; options on the command line win");
  auto* socket = app.add_option("--socket", overrides.socket_path, "Path of the control socket");
  auto* keeper =
      app.add_option("--keeper", overrides.keeper_socket_path, "Path of the keeper's socket");
  auto* port = app.add_option("--http-port", overrides.http_port,
                              "Port on localhost; 0: any free one, -1: no HTTP");
  auto* memory = app.add_option("--memory-bytes", overrides.memory_bytes, "Memory for all pools")
                     ->transform(CLI::AsSizeValue(false));
  auto* device = app.add_option("--device", overrides.device,
                                "Of pools that name none: auto, host, or a GPU's UUID");
  auto* level = app.add_option("--log-level", overrides.log_level, "trace ... error, off");
  CLI11_PARSE(app, argc, argv);
  try {
    Config config;
    if (!config_path.empty()) {
      auto read = larder::daemon::read_config(config_path);
      if (!read) return larder::daemon::fail(read.status());
      config = std::move(*read);
    }
    if (*socket) config.socket_path = overrides.socket_path;
    if (*keeper) config.keeper_socket_path = overrides.keeper_socket_path;
    if (*port) config.http_port = overrides.http_port;
    if (*memory) config.memory_bytes = overrides.memory_bytes;
    if (*device) config.device = overrides.device;
    if (*level) config.log_level = overrides.log_level;
    if (larder::Status status = larder::daemon::check_config(config); !status.ok())
      return larder::daemon::fail(status);
    larder::daemon::prepare_process(config);
    return larder::daemon::run(config);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "larderd: %s\n", error.what());
    return 1;
  }
}
