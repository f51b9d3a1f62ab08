// ControlConnection: requests to larderd and their replies, one at a time, each with a deadline.
//
// Replies to calls that were given up are dropped when they come. Thread rule: one thread at a
// time.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "larder/own_fd.h"
#include "larder/status.h"
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

  Result<Answer> call(protocol::RequestBody body);
  // The same, for requests that are answered with one kind of body. Another kind is INTERNAL.
  template <typename Body>
  Result<Body> call_for(protocol::RequestBody body) {
    Result<Answer> answer = call(std::move(body));
    if (!answer) return answer.status();
    if (auto* wanted = std::get_if<Body>(&answer->body)) return std::move(*wanted);
    return unexpected_reply(answer->body.index());
  }
  // What is waiting to be said need not be answered for longer than this.
  void set_deadline(std::chrono::microseconds deadline) { deadline_ = deadline; }

  const protocol::Connected& session() const { return session_; }
  std::vector<OwnFd> take_fds() { return std::move(fds_); }  // of the handshake
  uint64_t boot_id() const { return boot_id_; }
  const std::string& path() const { return path_; }

 private:
  ControlConnection(std::string path, OwnFd socket, std::chrono::microseconds deadline)
      : path_(std::move(path)), socket_(std::move(socket)), deadline_(deadline) {}
  static Status unexpected_reply(size_t kind);
  Status name_peer(const Status& status) const;

  std::string path_;
  OwnFd socket_;
  std::chrono::microseconds deadline_;
  uint64_t next_id_ = 1;
  uint64_t boot_id_ = 0;
  protocol::Connected session_;
  std::vector<OwnFd> fds_;
};

}  // namespace larder
