// larder-executor: started by larderd with a socket to it; not for people to start.
#include <cstdio>
#include <exception>
#include <memory>
#include <signal.h>
#include <string>
#include <sys/prctl.h>

#include <CLI/CLI.hpp>
#include <boost/asio/io_context.hpp>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "daemon/executor.h"
#include "daemon/mps.h"

int main(int argc, char** argv) {
  CLI::App app("Runs kernels for larderd, which starts it.", "larder-executor");
  int socket_fd = -1;
  std::string log_level = "info";
  std::string device;
  app.add_option("--socket-fd", socket_fd, "Inherited socket to larderd")->required();
  app.add_option("--log-level", log_level, "trace ... error, off");
  app.add_option("--device", device, "UUID of the GPU whose memory it runs on; empty: the host");
  CLI11_PARSE(app, argc, argv);
  try {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "larder-executor", std::make_shared<spdlog::sinks::stderr_sink_st>()));
    spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e %n %l %v");
    spdlog::set_level(spdlog::level::from_str(log_level));
    // Nobody needs what it computes once larderd is gone, and the next larderd brings its own.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::signal(SIGPIPE, SIG_IGN);
    // A Ctrl-C in larderd's terminal reaches its children too; larderd decides when we end.
    ::signal(SIGINT, SIG_IGN);
    ::signal(SIGHUP, SIG_IGN);
    larder::daemon::join_mps_again();
    boost::asio::io_context loop(1);
    larder::daemon::Executor executor(loop, larder::OwnFd(socket_fd), device);
    loop.run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "larder-executor: %s\n", error.what());
    return 1;
  }
}
