// ControlConnection: one connection to larderd; requests and their replies, one at a time, each
// with a deadline.
//
// Replies to calls that were given up are dropped when they come. Thread rule: one thread at a
// time; fd() and shut_down() from any.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "larder/own_fd.h"
#include "larder/status.h"
#include "protocol/channel.h"
#include "protocol/messages.h"

namespace larder {

class ControlConnection {
 public:
  struct Answer {
    protocol::ReplyBody body;  // never a Status: that is returned as such
    std::vector<OwnFd> fds;
  };

  // Empty path: $LARDER_SOCKET, else /run/larder/larderd.sock. Versions are filled in here.
  static Result<ControlConnection> connect(const std::string& path, protocol::Connect hello,
                                           std::chrono::microseconds deadline);
  // The socket alone: nothing is said yet. `path` is not empty.
  static Result<ControlConnection> open(const std::string& path, protocol::Deadline deadline);

  Result<Answer> call(protocol::RequestBody body);
  // The same, for requests that are answered with one kind of body. Another kind is INTERNAL.
  template <typename Body>
  Result<Body> call_for(protocol::RequestBody body) {
    return only<Body>(call(std::move(body)));
  }
  template <typename Body>
  static Result<Body> only(Result<Answer> answer) {
    if (!answer) return answer.status();
    if (auto* wanted = std::get_if<Body>(&answer->body)) return std::move(*wanted);
    return unexpected_reply(answer->body.index());
  }

  // A request whose id and answered_below the caller has chosen; its deadline is filled in here.
  // The fds travel with it, and stay the caller's.
  Result<Answer> exchange(protocol::Request& request, protocol::Deadline deadline,
                          std::span<const int> fds = {});
  // The two halves of it.
  Status send(protocol::Request& request, protocol::Deadline deadline,
              std::span<const int> fds = {});
  Result<Answer> receive(uint64_t id, protocol::Deadline deadline);

  // Whether larderd has gone, or the connection was shut down: the last call failed for it, and all
  // further ones will.
  bool is_lost() const { return lost_; }
  int fd() const { return socket_.get(); }
  // Wakes whoever waits for the connection: for them it is lost.
  void shut_down() const;

  const protocol::Connected& session() const { return session_; }
  std::vector<OwnFd> take_fds() { return std::move(fds_); }  // of the handshake
  uint64_t boot_id() const { return boot_id_; }              // of the last reply
  const std::string& path() const { return path_; }
  // Says who did not answer, or did not answer well.
  Status name_peer(const Status& status) const;

 private:
  ControlConnection(std::string path, OwnFd socket)
      : path_(std::move(path)), socket_(std::move(socket)) {}
  static Status unexpected_reply(size_t kind);
  Status note_loss(const Status& status);

  std::string path_;
  OwnFd socket_;
  std::chrono::microseconds deadline_{};  // of call()
  uint64_t next_id_ = 1;                  // of call()
  uint64_t boot_id_ = 0;
  bool lost_ = false;
  protocol::Connected session_;
  std::vector<OwnFd> fds_;
};

}  // namespace larder
