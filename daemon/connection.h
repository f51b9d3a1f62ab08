// Connection: a SEQPACKET socket on the event loop, for sessions and for the executor's link.
//
// Reads messages and hands them on one by one; queues what the socket has no room for. Thread rule:
// the loop's thread only.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "larder/own_fd.h"
#include "protocol/channel.h"
#include "protocol/messages.h"

namespace larder::daemon {

// Shared between its owner and the handlers that are under way on the loop, so that an owner may
// drop it from inside its own callback.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  struct Handlers {
    std::function<void(protocol::Received)> on_message;  // kMessage or kRefused
    std::function<void()> on_closed;                     // once, also when the queue overflowed
  };

  Connection(boost::asio::io_context& loop, OwnFd socket, size_t max_queued);

  void start(Handlers handlers);
  // Queues when the socket is full; more than max_queued messages close the connection: the peer
  // does not read.
  void send(protocol::Bytes bytes, std::vector<OwnFd> fds = {});
  // Closes without on_closed.
  void close();
  bool is_open() const { return socket_.is_open(); }
  // What has been sent and not been read by the peer, with the kernel's bookkeeping; all of it when
  // messages are queued here.
  int unread_bytes();
  int fd() { return socket_.native_handle(); }

 private:
  struct Outgoing {
    protocol::Bytes bytes;
    std::vector<OwnFd> fds;
  };

  void wait_readable();
  void read_some();
  void wait_writable();
  void write_some();
  bool try_send(const Outgoing& message);  // false: the socket is full
  void end();
  void end_later();

  boost::asio::posix::stream_descriptor socket_;
  boost::asio::steady_timer pause_;
  size_t max_queued_;
  Handlers handlers_;
  std::deque<Outgoing> queue_;
  bool writing_ = false;
};

// A duplicate for a message, close-on-exec. Throws SystemError.
OwnFd duplicate(int fd);

}  // namespace larder::daemon
