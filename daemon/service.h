// Service: sessions in, decisions by the state machine, effects out.
//
// It owns the machine with its journal, the pools' memory and the sessions, and joins them to the
// keeper and the executor. Thread rule: the loop's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

#include "allocator/recorded_machine.h"
#include "daemon/config.h"
#include "daemon/executors.h"
#include "daemon/journal_file.h"
#include "daemon/keeper_client.h"
#include "daemon/metrics.h"
#include "daemon/pool_store.h"
#include "daemon/recovery.h"
#include "daemon/session.h"
#include "protocol/messages.h"

namespace larder::daemon {

class Service : private Outside {
 public:
  // Config is checked. recover() comes next, then start().
  Service(boost::asio::io_context& loop, const Config& config, KeeperClient keeper,
          std::string executor_path);
  ~Service() override;

  // Takes up what an earlier larderd has left, or begins a cache. Not ok: it must not serve.
  Status recover(Recovery recovery);
  void start();
  void accept(OwnFd socket);
  // New sessions are refused with SHUTTING_DOWN from now on, and the others are told; `then` runs
  // once none is left. Those that stay are taken up by the next larderd.
  void drain(std::function<void()> then);

  // Empty when requests of every kind can be served, else the reason.
  std::optional<std::string> not_ready() const;
  // Empty while a restart of larderd would mend nothing, else the reason.
  std::optional<std::string> not_live() const;
  std::string metrics_text();
  protocol::DaemonStatus status() const;

  // How a session ends: its peer has closed the socket, its process is gone (and somebody else has
  // the socket), larderd ends it, or it has not come back after a restart.
  enum class End { kPeerClosed, kProcessGone, kEnded, kNotBack };

 private:
  // A request that the state machine will answer, now or later.
  using RequestName = std::pair<SessionId, uint64_t>;
  struct Pending {
    int64_t deadline_us;         // absolute, 0: none
    bool answered;               // by its deadline; what it does to the session still counts
    bool applied;                // the machine has it
    std::optional<PoolId> pool;  // that it names
    bool closes;                 // the session leaves the pool when this succeeds
  };

  const StateMachine& machine() const { return recorded_.machine(); }
  void apply(Event event) { recorded_.apply(std::move(event)); }

  // service.cpp: time
  int64_t now_us() override { return now(); }
  static int64_t now();  // the clock of everything here: monotonic, over restarts too
  void tick();
  void expire_requests();
  void end_silent_guests();
  void end_absent_sessions();
  void end_overdue_sessions();
  void forget_settled_sessions();

  // service_recovery.cpp: what an earlier larderd left, and a new keeper
  Status restore(Recovery& recovery);
  Status restore_pool(const PoolRecord& record, Recovery& recovery);
  Status restore_session(const SessionAttachment& saved, SessionFds fds);
  Status restore_closing(const UnfencedSession& session, SessionFds fds);
  void drop_unnamed(const Recovery& recovery);
  Configure configuration() const;
  void reconnect_keeper();
  Status deposit_everything(KeeperClient& keeper);
  Status deposit_session(KeeperClient& keeper, const Session& session);
  Status deposit_closing(KeeperClient& keeper, ClosingSession& closing);
  Status deposit_executor(KeeperClient& keeper, const std::string& device);

  // service_sessions.cpp: how sessions come, come back and go
  Session* find(SessionId id);
  void on_message(uint64_t connection, protocol::Received received);
  void on_closed(uint64_t connection);
  void handle_guest(uint64_t number, const protocol::Request& request);
  void refuse_guest(const Guest& guest, uint64_t id, const Status& status);
  void connect(uint64_t number, uint64_t id, const protocol::Connect& body);
  Status check_access(const Guest& guest, const protocol::Connect& body) const;
  void resume(uint64_t number, uint64_t id, const protocol::Resume& body);
  Result<Session*> find_resumable(const Guest& guest, const protocol::Resume& body);
  void greet(Session& session, uint64_t id, uint32_t max_version, std::vector<OwnFd> fds);
  void open_notices(Session& session, std::vector<OwnFd>& fds);
  void on_notice_ack(SessionId id, protocol::Received received);
  void watch_process(Session& session);

  // service_closing.cpp: what of a session outlives it
  void end_session(SessionId id, End how);
  FenceClass fence_class(const Session& session, End how) const;
  void watch_closing(ClosingSession& closing, OwnFd process, OwnFd lifeline);
  void settle(SessionId id);
  void forget_deposits(SessionId id);

  // service_requests.cpp: what each request does
  void handle(Session& session, protocol::Request request, std::vector<OwnFd> fds);
  void reply(Session& session, uint64_t id, protocol::ReplyBody body, std::vector<OwnFd> fds = {});
  // The pool's description with what came through the arena.
  Result<protocol::PoolSpec> with_key_offsets(const Session& session,
                                              protocol::PoolSpec spec) const;
  void open_pool(Session& session, const protocol::Request& request,
                 const protocol::OpenPool& body);
  void forward(Session& session, const protocol::Request& request);
  void submit(Event event, const RequestName& name);
  std::vector<int32_t> blocks_per_unit(PoolId pool) const;
  Status add_pending(Session& session, const protocol::Request& request);
  Result<Event> to_event(const Session& session, const protocol::Request& request);
  Result<Event> to_event(const Session& session, const protocol::Request& request,
                         const protocol::Publish& body);
  Result<Event> to_event(const Session& session, const protocol::Request& request,
                         const protocol::Lookup& body);
  Result<Event> to_event(const Session& session, const protocol::Request& request,
                         const protocol::OpenSegments& body);
  Result<std::vector<int32_t>> tokens_of(const Session& session, uint64_t pool,
                                         const protocol::TokenList& list) const;

  // service_imports.cpp: memory of engines, and where the rings of sessions are served
  ExecutorLink& executor_of(const Session& session) { return executors_.of(session.ring_device); }
  ExecutorLink& executor_of(PoolId pool) { return executors_.of(store_.find(pool)->device); }
  void move_ring(Session& session, const std::string& device);
  void retire_executor(const std::string& device);
  void register_import(Session& session, uint64_t request, const protocol::RegisterImport& body,
                       std::vector<OwnFd> fds);
  void drop_import(Session& session, uint64_t request, uint64_t import_id);
  void tell_executor_import(const Session& session, uint64_t import_id,
                            const Session::Import& memory);
  void on_imported(const protocol::ImportDone& done);

  // service_views.cpp: what larderd shows of itself
  protocol::Pools list_pools(const Session& session, uint64_t after) const;
  protocol::Sessions list_sessions(const Session& session, uint64_t after) const;
  protocol::Tenants list_tenants(const Session& session) const;
  bool may_see(const Session& session, const std::string& tenant) const;

  // service_effects.cpp: carrying out what the machine decides
  Status create_segment(const CreateSegment& effect) override;
  void drop_segment(SegmentId segment) override;
  bool append(std::span<const std::byte> record) override;
  void checkpoint(std::span<const std::byte> snapshot) override;
  void carry_out(Effect effect) override;
  void carry_out_one(Effect& effect);
  void ask_to_unmap(const UnmapSegment& effect);
  void answer(Reply effect);
  Result<StoredPool> make_pool(const PoolRecord& record, std::optional<SharedCounters> counters);
  void forget_pool(PoolId pool);
  void tell_executor_or_restart(ExecutorLink& executor, const std::function<void()>& tell);
  void tell_executor_all(const std::string& device);
  void tell_executor_pool(PoolId id, const StoredPool& pool);
  void tell_executor_segments(PoolId id, uint32_t index, const StoredGroup& group);
  void tell_executor_session(const Session& session);
  void on_executor_died(const std::string& device);

  boost::asio::io_context& loop_;
  const Config& config_;
  KeeperClient keeper_;
  std::optional<JournalFile> journal_;  // from recover() on
  Executors executors_;
  MemoryDevices devices_;
  RecordedMachine recorded_;
  PoolStore store_;
  Metrics metrics_;

  std::map<uint64_t, Guest> guests_;           // by connection
  std::map<uint64_t, SessionId> connections_;  // of sessions
  std::map<SessionId, std::unique_ptr<Session>> sessions_;
  std::map<SessionId, ClosingSession> closing_;
  std::map<RequestName, Pending> pending_;
  std::map<uint64_t, RunCopy> copies_;  // under way in the executor
  // During recover(): of sessions that were closing when the last larderd ended.
  std::map<SessionId, std::pair<OwnFd, OwnFd>> closing_fds_;  // pidfd and lifeline

  uint64_t boot_id_;
  int64_t started_at_us_;
  uint64_t next_connection_ = 1;
  uint32_t next_import_ = 0;  // 0: none was made yet
  boost::asio::steady_timer tick_timer_;
  std::function<void()> drained_;
  bool draining_ = false;
  int64_t keeper_retry_us_ = 0;        // not before
  std::optional<Status> journal_lag_;  // why the keeper does not have the journal that is in use
  int64_t recovered_sessions_ = 0;
  int64_t recovered_pools_ = 0;
};

}  // namespace larder::daemon
