// larderd's side of the protocol, played by a test: it sees each request of a client, and answers,
// keeps silent, goes and comes back as the test says.
#pragma once

#include <chrono>
#include <future>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

#include "larder/client.h"
#include "larder/own_fd.h"
#include "protocol/channel.h"
#include "protocol/messages.h"
#include "protocol/notices.h"
#include "tests/support/process.h"

namespace larder::test {

inline protocol::Deadline soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(20);
}

// One connection of a client.
class Peer {
 public:
  Peer(OwnFd control, uint64_t boot_id) : control_(std::move(control)), boot_id_(boot_id) {}

  // The next request; fails the test when none comes.
  protocol::Request next();
  template <typename Body>
  std::pair<protocol::Request, Body> expect() {
    protocol::Request request = next();
    const auto* body = std::get_if<Body>(&request.body);
    REQUIRE_MESSAGE(body != nullptr, "request kind ", request.body.index());
    Body copy = *body;
    return {std::move(request), std::move(copy)};
  }
  void reply(uint64_t id, protocol::ReplyBody body, const std::vector<int>& fds = {});
  // The next request is of this kind, and is answered so.
  template <typename Body>
  Body answer(protocol::ReplyBody body, const std::vector<int>& fds = {}) {
    auto [request, asked] = expect<Body>();
    reply(request.id, std::move(body), fds);
    return asked;
  }
  void notify(const protocol::Notice& notice) { notify(protocol::encode(notice)); }
  void notify(const protocol::Bytes& bytes);
  protocol::NoticeAck next_ack();
  bool has_ack() const;  // unread
  // Makes the notice socket; returns the client's end of it.
  OwnFd open_notices();
  void close_notices() { notices_.reset(); }

 private:
  OwnFd control_;
  OwnFd notices_;
  uint64_t boot_id_;
};

class ScriptedDaemon {
 public:
  static constexpr uint64_t kSession = 7;
  static constexpr uint64_t kCache = 99;

  ScriptedDaemon() { listen(); }

  std::string socket() const { return folder_.file("larderd.sock"); }
  void listen();
  void stop_listening();        // the file is gone, too
  bool has_connection() const;  // waiting to be accepted

  Peer accept();
  // A client that connects, and one that comes back. The boot id counts up.
  Peer accept_connect(const std::vector<int>& arena_fds = {}, uint64_t arena_bytes = 0);
  Peer accept_resume();
  protocol::Connected connected(uint64_t arena_bytes) const;

  // A client of this daemon and its connection.
  struct Joined {
    Client client;
    Peer peer;
  };
  Joined join(ClientOptions options = no_arena(), const std::vector<int>& arena_fds = {},
              uint64_t arena_bytes = 0);
  static ClientOptions no_arena();
  // Ends a client whose goodbye is answered.
  static void end(Client client, Peer& peer);

 private:
  TemporaryFolder folder_;
  OwnFd listener_;
  uint64_t boot_id_ = 100;
};

inline void check_status(const Status& status, ErrorCode code, const std::string& part) {
  CAPTURE(status.to_string());
  CHECK(status.code() == code);
  CHECK(status.message().find(part) != std::string::npos);
}

// Runs beside the test; the result's get() brings exceptions, failed REQUIREs too.
template <typename Call>
auto beside(Call call) {
  return std::async(std::launch::async, std::move(call));
}

// Whether an address can be read: write(2) says EFAULT where a load would fault.
bool is_readable(const std::byte* address);

}  // namespace larder::test
