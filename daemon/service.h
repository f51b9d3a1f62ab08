// Service: sessions in, decisions by the state machine, effects out.
//
// It owns the state machine, the pools' memory and the sessions, and joins them to the keeper and
// the executor. Thread rule: the loop's thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "allocator/state_machine.h"
#include "daemon/config.h"
#include "daemon/executor_link.h"
#include "daemon/keeper_client.h"
#include "daemon/metrics.h"
#include "daemon/pool_store.h"
#include "daemon/session.h"
#include "protocol/messages.h"

namespace larder::daemon {

class Service {
 public:
  // Config is checked; the keeper is empty.
  Service(boost::asio::io_context& loop, const Config& config, KeeperClient keeper,
          std::string executor_path);
  ~Service();

  void start();
  void accept(OwnFd socket);
  // New sessions are refused with SHUTTING_DOWN from now on; `then` runs once none is left.
  void drain(std::function<void()> then);

  // Empty when requests of every kind can be served, else the reason.
  std::optional<std::string> not_ready() const;
  std::string metrics_text();
  protocol::DaemonStatus status() const;

 private:
  // A request that the state machine will answer, now or later.
  struct Pending {
    SessionId session;
    uint64_t id;
    int64_t deadline_us;           // absolute, 0: none
    bool answered;                 // by its deadline; what it does to the session still counts
    std::optional<PoolId> closes;  // the pool that the session leaves when this succeeds
  };

  // A session whose connection is gone while its process may still write into open blocks.
  struct Writer {
    std::unique_ptr<Session> session;
    boost::asio::posix::stream_descriptor process;  // its pidfd, readable once it has exited
  };

  // service.cpp: connections
  int64_t now_us() const;
  Session* find(SessionId id);
  void on_message(SessionId id, protocol::Received received);
  void on_closed(SessionId id);
  void forget(SessionId id);
  void watch_writer(SessionId id);
  void tick();
  void expire_requests();
  void end_silent_connections();
  void reconnect_keeper();

  // service_requests.cpp: what each request does
  void handle(Session& session, protocol::Request request);
  void reply(Session& session, uint64_t id, protocol::ReplyBody body, std::vector<OwnFd> fds = {});
  void connect(Session& session, uint64_t id, const protocol::Connect& body);
  Status check_access(const Session& session, const protocol::Connect& body) const;
  // The pool's description with what came through the arena.
  Result<protocol::PoolSpec> with_key_offsets(const Session& session,
                                              protocol::PoolSpec spec) const;
  void open_pool(Session& session, const protocol::Request& request,
                 const protocol::OpenPool& body);
  void open_segments(Session& session, uint64_t id, const protocol::OpenSegments& body);
  void forward(Session& session, const protocol::Request& request);
  Status check_token_count(PoolId id, const protocol::TokenList& list) const;
  Result<Event> to_event(const Session& session, uint64_t ticket, const protocol::Request& request);
  uint64_t add_pending(Session& session, const protocol::Request& request);
  protocol::Pools list_pools(const Session& session, uint64_t after) const;
  protocol::Sessions list_sessions(const Session& session, uint64_t after) const;
  bool may_see(const Session& session, const std::string& tenant) const;

  // service_effects.cpp: carrying out what the machine decides
  void apply(Event event);
  void carry_out(Effect effect);
  void create_segment(const CreateSegment& effect);
  Status deposit(const CreateSegment& effect, const Segment& segment);
  void answer(Reply effect);
  void add_staged_pool(PoolId pool);
  void tell_executor_all();
  void tell_executor_pool(PoolId id, const StoredPool& pool);
  void tell_executor_session(const Session& session);
  void on_executor_died();

  boost::asio::io_context& loop_;
  const Config& config_;
  KeeperClient keeper_;
  ExecutorLink executor_;
  StateMachine machine_;
  PoolStore store_;
  Metrics metrics_;

  std::map<SessionId, std::unique_ptr<Session>> sessions_;
  std::map<SessionId, Writer> writers_;
  // Between the end of a connection and the machine's word whether its process must be watched.
  std::map<SessionId, std::unique_ptr<Session>> leaving_;
  std::map<uint64_t, Pending> pending_;  // by ticket
  std::deque<Event> events_;             // to be applied, in order
  bool applying_ = false;
  // The pool whose creation is being decided: its id is known only from the first effect.
  std::optional<protocol::PoolSpec> staged_spec_;
  std::map<uint64_t, RunCopy> copies_;  // under way in the executor

  uint64_t boot_id_;
  int64_t started_at_us_;
  uint64_t next_session_ = 1;
  uint64_t next_ticket_ = 1;
  boost::asio::steady_timer tick_timer_;
  std::function<void()> drained_;
  bool draining_ = false;
  int64_t keeper_retry_us_ = 0;  // not before
};

}  // namespace larder::daemon
