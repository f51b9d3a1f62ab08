// HttpServer: /metrics, /livez and /readyz on localhost, on the daemon's own loop.
//
// /livez answers 200 while the loop turns and its executors come up; /readyz 503 with the reason
// while not everything can be served. One request per connection, with a limit on its size and
// time. Thread rule: the loop's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

namespace larder::daemon {

class HttpServer {
 public:
  struct Pages {
    std::function<std::string()> metrics;
    std::function<std::optional<std::string>()> not_ready;
    std::function<std::optional<std::string>()> not_live;
  };

  // Binds; port 0 takes a free one, and one that is taken is asked for again for 2 s (heirs.h).
  // Throws boost::system::system_error naming address and port.
  HttpServer(boost::asio::io_context& loop, const std::string& address, uint16_t port, Pages pages);
  uint16_t port() const { return port_; }

 private:
  friend class HttpExchange;
  void accept();

  // Shared with the connections that are under way, which the loop may destroy after the server.
  struct State {
    Pages pages;
    int num_connections = 0;
  };

  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer pause_;
  uint16_t port_;
  std::shared_ptr<State> state_;
};

}  // namespace larder::daemon
