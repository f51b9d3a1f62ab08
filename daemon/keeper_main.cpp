// larder-keeper: holds the memory's file descriptors while larderd comes and goes.
#include <cstdio>
#include <exception>
#include <string>
#include <sys/resource.h>

#include <CLI/CLI.hpp>

#include "daemon/keeper.h"
#include "daemon/socket_file.h"

int main(int argc, char** argv) {
  CLI::App app("Holds the file descriptors of larderd's memory.", "larder-keeper");
  std::string socket_path = "/run/larder/keeper.sock";
  app.add_option("--socket", socket_path, "Path of the socket that larderd connects to")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
      limit.rlim_cur = limit.rlim_max;
      ::setrlimit(RLIMIT_NOFILE, &limit);
    }
    // Whoever may speak to the keeper may have the memory of every tenant.
    auto socket = larder::daemon::SocketFile::bind(socket_path, 0600);
    if (!socket) {
      std::fprintf(stderr, "larder-keeper: %s\n", socket.status().to_string().c_str());
      return 1;
    }
    std::fprintf(stderr, "larder-keeper: serving at %s\n", socket_path.c_str());
    return larder::daemon::serve_keeper(socket->fd());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "larder-keeper: %s\n", error.what());
    return 1;
  }
}
