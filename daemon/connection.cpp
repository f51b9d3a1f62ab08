#include "daemon/connection.h"

#include <chrono>
#include <fcntl.h>
#include <limits>
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <boost/asio/post.hpp>
#include <spdlog/spdlog.h>

#include "larder/system_error.h"

namespace larder::daemon {
namespace {

// So many messages of one peer are read before others get their turn.
constexpr int kMessagesPerTurn = 4;
constexpr auto kFdsPause = std::chrono::milliseconds(5);

}  // namespace

OwnFd duplicate(int fd) {
  OwnFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) throw SystemError("fcntl(F_DUPFD_CLOEXEC, fd " + std::to_string(fd) + ")");
  return copy;
}

Connection::Connection(boost::asio::io_context& loop, OwnFd socket, size_t max_queued)
    : socket_(loop, socket.get()), pause_(loop), max_queued_(max_queued) {
  socket.release();  // the descriptor object owns it from here on
}

void Connection::start(Handlers handlers) {
  handlers_ = std::move(handlers);
  wait_readable();
}

void Connection::wait_readable() {
  socket_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                     [self = shared_from_this()](const boost::system::error_code& error) {
                       if (!error) self->read_some();
                     });
}

void Connection::read_some() {
  for (int i = 0; i < kMessagesPerTurn && is_open(); ++i) {
    protocol::Received received;
    try {
      received = protocol::receive(fd());
    } catch (const SystemError& error) {
      spdlog::warn("event=connection_broken error=\"{}\"", error.what());
      received.kind = protocol::Received::Kind::kEnd;
    }
    if (received.kind == protocol::Received::Kind::kEnd) return end();
    if (received.kind == protocol::Received::Kind::kNothing) break;
    handlers_.on_message(std::move(received));
  }
  if (is_open()) wait_readable();
}

void Connection::send(protocol::Bytes bytes, std::vector<OwnFd> fds) {
  if (!is_open()) return;
  Outgoing message{std::move(bytes), std::move(fds)};
  if (queue_.empty() && try_send(message)) return;
  if (!is_open()) return;
  if (queue_.size() >= max_queued_) {
    spdlog::warn("event=slow_reader queued={}", queue_.size());
    return end_later();
  }
  queue_.push_back(std::move(message));
  if (!writing_) wait_writable();
}

void Connection::wait_writable() {
  writing_ = true;
  socket_.async_wait(boost::asio::posix::stream_descriptor::wait_write,
                     [self = shared_from_this()](const boost::system::error_code& error) {
                       if (!error) self->write_some();
                     });
}

void Connection::write_some() {
  bool sent_any = false;
  while (!queue_.empty() && try_send(queue_.front())) {
    queue_.pop_front();
    sent_any = true;
  }
  writing_ = !queue_.empty() && is_open();
  if (!writing_) return;
  if (sent_any) return wait_writable();
  // Writable and yet full: too many fds of ours are under way to peers that do not read.
  pause_.expires_after(kFdsPause);
  pause_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error && self->is_open()) self->wait_writable();
  });
}

bool Connection::try_send(const Outgoing& message) {
  std::vector<int> fds;
  fds.reserve(message.fds.size());
  for (const OwnFd& fd : message.fds) fds.push_back(fd.get());
  // A peer that is gone is noticed by the read side, which ends the connection.
  try {
    return protocol::send(fd(), message.bytes, fds) != protocol::Sent::kFull;
  } catch (const SystemError& error) {
    spdlog::warn("event=connection_broken error=\"{}\"", error.what());
    end_later();
    return true;
  }
}

// Not from inside the caller, who may hold references into what on_closed destroys.
void Connection::end_later() {
  boost::asio::post(socket_.get_executor(), [self = shared_from_this()] { self->end(); });
}

int Connection::unread_bytes() {
  int bytes = 0;
  if (!queue_.empty() || ::ioctl(fd(), SIOCOUTQ, &bytes) != 0)
    return std::numeric_limits<int>::max();
  return bytes;
}

void Connection::close() {
  boost::system::error_code ignored;
  socket_.close(ignored);
  pause_.cancel();
  queue_.clear();
}

void Connection::end() {
  if (!is_open()) return;
  close();
  // The handlers hold references into the owner; they must not outlive this call.
  const Handlers handlers = std::move(handlers_);
  handlers_ = {};
  if (handlers.on_closed) handlers.on_closed();
}

}  // namespace larder::daemon
