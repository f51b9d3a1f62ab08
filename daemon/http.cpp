#include "daemon/http.h"

#include <chrono>
#include <memory>
#include <sstream>

#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <spdlog/spdlog.h>

#include "daemon/heirs.h"

namespace larder::daemon {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;

constexpr auto kTimeout = std::chrono::seconds(5);
constexpr size_t kMaxRequestBytes = size_t{8} * 1024;
constexpr int kMaxConnections = 64;
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

using Response = http::response<http::string_body>;

void judge(const std::optional<std::string>& reason, Response& response) {
  if (reason) response.result(http::status::service_unavailable);
  response.body() = reason ? *reason + "\n" : "ok\n";
}

Response respond(const HttpServer::Pages& pages, const http::request<http::empty_body>& request) {
  Response response;
  response.version(request.version());
  response.set(http::field::content_type, "text/plain; charset=utf-8");
  response.keep_alive(false);
  if (request.method() != http::verb::get && request.method() != http::verb::head) {
    response.result(http::status::method_not_allowed);
    response.set(http::field::allow, "GET, HEAD");
  } else if (request.target() == "/metrics") {
    response.set(http::field::content_type, "text/plain; version=0.0.4; charset=utf-8");
    response.body() = pages.metrics();
  } else if (request.target() == "/livez") {
    judge(pages.not_live(), response);
  } else if (request.target() == "/readyz") {
    judge(pages.not_ready(), response);
  } else {
    response.result(http::status::not_found);
    response.body() = "known are /metrics, /livez and /readyz\n";
  }
  response.prepare_payload();
  if (request.method() == http::verb::head) response.body().clear();
  return response;
}

asio::ip::tcp::acceptor listen(asio::io_context& loop, const asio::ip::tcp::endpoint& endpoint) {
  asio::ip::tcp::acceptor acceptor(loop, endpoint.protocol());
  acceptor.set_option(asio::socket_base::reuse_address(true));
  beast::error_code error;
  await_heirs([&] {
    acceptor.bind(endpoint, error);
    return error == asio::error::address_in_use;
  });
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    std::ostringstream text;
    text << "the HTTP server's address, " << endpoint;
    // Without the place in Asio that the error carries.
    throw boost::system::system_error(error.value(), error.category(), text.str());
  }
  return acceptor;
}

}  // namespace

// One connection; it lives as long as a handler on the loop holds it.
class HttpExchange : public std::enable_shared_from_this<HttpExchange> {
 public:
  HttpExchange(asio::ip::tcp::socket socket, std::shared_ptr<HttpServer::State> state)
      : stream_(std::move(socket)), state_(std::move(state)) {
    ++state_->num_connections;
    parser_.header_limit(kMaxRequestBytes);
  }
  ~HttpExchange() { --state_->num_connections; }
  HttpExchange(const HttpExchange&) = delete;
  HttpExchange& operator=(const HttpExchange&) = delete;

  void run() {
    stream_.expires_after(kTimeout);
    http::async_read_header(stream_, buffer_, parser_,
                            [self = shared_from_this()](beast::error_code error, size_t) {
                              if (!error) self->answer();
                            });
  }

 private:
  void answer() {
    response_ = respond(state_->pages, parser_.get());
    stream_.expires_after(kTimeout);
    http::async_write(stream_, response_, [self = shared_from_this()](beast::error_code, size_t) {
      beast::error_code ignored;
      self->stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
    });
  }

  beast::tcp_stream stream_;
  beast::flat_buffer buffer_{kMaxRequestBytes};
  http::request_parser<http::empty_body> parser_;
  Response response_;
  std::shared_ptr<HttpServer::State> state_;  // with the server
};

HttpServer::HttpServer(asio::io_context& loop, const std::string& address, uint16_t port,
                       Pages pages)
    : acceptor_(listen(loop, {asio::ip::make_address(address), port})),
      pause_(loop),
      port_(acceptor_.local_endpoint().port()),
      state_(std::make_shared<State>(State{std::move(pages), 0})) {
  accept();
}

void HttpServer::accept() {
  acceptor_.async_accept([this](beast::error_code error, asio::ip::tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (!error && state_->num_connections < kMaxConnections)
      std::make_shared<HttpExchange>(std::move(socket), state_)->run();
    if (!error) return accept();
    // Without free descriptors accept fails at once, again and again.
    pause_.expires_after(kAcceptPause);
    pause_.async_wait([this](beast::error_code pause_error) {
      if (!pause_error) accept();
    });
  });
}

}  // namespace larder::daemon
