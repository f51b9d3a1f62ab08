// Session: what a client has with larderd, over as many connections as it takes.
//
// A thread of its own, blocked nearly always, reads the notice socket and sees when larderd goes.
// It then resumes the session by itself, so that an engine that makes no calls keeps what it holds.
// Calls wait for it within their deadlines, and send the same request again under its old id:
// larderd does it once. When larderd does not know the session any more, that is final.
//
// Thread rule: calls are made by one thread at a time; on_unmap comes from the session's own
// thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/control_connection.h"
#include "protocol/notices.h"

namespace larder {

class Session {
 public:
  using Answer = ControlConnection::Answer;
  // How long a call waits for a larderd that is away.
  enum class Patience {
    kCall,  // until the call's deadline
    kEnd,   // destructors: until one deadline after the loss, however many there are
  };

  // Connects, with `hello.notices` set. Nothing is waited for when nobody listens.
  static Result<std::unique_ptr<Session>> open(const std::string& path, protocol::Connect hello,
                                               std::chrono::microseconds deadline);
  ~Session();  // says goodbye if larderd is there within a second, and ends the thread
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Arena and eventfd, where there is an arena.
  std::vector<OwnFd> take_fds() { return std::move(fds_); }
  // Once. `on_unmap` has unmapped the segment when it returns; where it throws, larderd is not
  // told so, and ends the session at its deadline.
  void start(std::function<void(const protocol::Unmap&)> on_unmap);

  // The fds travel with the request, and stay the caller's.
  Result<Answer> call(protocol::RequestBody body, Patience patience = Patience::kCall,
                      std::span<const int> fds = {});
  template <typename Body>
  Result<Body> call_for(protocol::RequestBody body, Patience patience = Patience::kCall) {
    return ControlConnection::only<Body>(call(std::move(body), patience));
  }

  // OK while the session lives; then for good why it does not: STALE_SESSION with larderd's
  // sentence, or UNAVAILABLE where larderd refused to resume it for another reason.
  Status ended() const;
  const protocol::Connected& connected() const { return connected_; }  // of the first handshake
  uint64_t boot_id() const;
  uint64_t resumes() const;
  std::chrono::microseconds longest_outage() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Connection = std::shared_ptr<ControlConnection>;

  Session(ControlConnection connection, std::chrono::microseconds deadline);
  Result<Connection> await_connection(Clock::time_point deadline);
  Result<Answer> call_before(protocol::RequestBody body, Clock::time_point deadline,
                             std::span<const int> fds = {});
  Clock::time_point deadline_of(Patience patience) const;
  void say_goodbye();

  // The thread's part.
  void run(Connection connection);
  void watch(const ControlConnection& connection);
  bool read_notice();
  void lose(const Connection& connection);
  Connection resume();
  Connection resumed_over(ControlConnection connection);
  Result<ControlConnection> try_resume(Status& refusal);
  Status take_up(const ControlConnection& connection, Answer answer);
  bool is_stopping(std::chrono::milliseconds wait) const;

  const std::chrono::microseconds deadline_;
  const std::string path_;
  const protocol::Connected connected_;
  std::vector<OwnFd> fds_;
  uint64_t next_id_ = 2;  // connect was 1; ids go on over a resume
  std::function<void(const protocol::Unmap&)> on_unmap_;
  OwnFd stop_;      // an eventfd: the thread is to end
  OwnFd notices_;   // not valid where larderd gave none
  OwnFd lifeline_;  // never written: its end tells larderd that no process of ours has it any more

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  Connection connection_;  // empty while larderd is away
  Clock::time_point lost_at_;
  Status last_attempt_;  // why it is not resumed yet
  Status ended_;
  bool leaving_ = false;  // goodbye is being said: not worth a resume
  uint64_t boot_id_ = 0;
  uint64_t resumes_ = 0;
  std::chrono::microseconds longest_outage_{0};

  std::thread thread_;
};

}  // namespace larder
