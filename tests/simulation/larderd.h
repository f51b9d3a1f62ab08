// Larderd: the process larderd of the simulated node, around the real RecordedMachine and Journal.
//
// It does what daemon/ does: owns the keeper, deposits what has to outlive it before it is named,
// keeps the journal, tells sessions what the machine says, and goes on where its predecessor was
// killed. Being killed is an exception (LarderdKilled) from inside any of it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>

#include "allocator/journal.h"
#include "allocator/recorded_machine.h"
#include "tests/simulation/client.h"
#include "tests/simulation/executor.h"
#include "tests/simulation/messages.h"

namespace larder::sim {

class Larderd : private Outside {
 public:
  explicit Larderd(Scene& scene);
  ~Larderd() override;

  enum class Started { kServing, kNoKeeper, kBusy };
  Started start();
  // Takes up one thing that is waiting; false when there is nothing.
  bool act();
  std::shared_ptr<Connection> accept(Client& client);
  bool knows(const Client& client) const;  // has a connection of it
  // It was killed: what its journal says by now, for its successor to be compared with; connections
  // break; its process exits at once, or is still there for a while.
  void is_killed();
  // Frees all pools, for the end of a world.
  void destroy_pools();

  const std::shared_ptr<SimProcess>& shared_process() const { return process_; }
  bool owns_keeper() const { return scene_.keeper.is_up(*link_); }
  // No copy is under way, and it waits for nobody.
  bool is_idle() const { return copies_.empty() && connections_.empty() && fencing_.empty(); }
  const StateMachine& machine() const { return machine_.machine(); }
  // The journal's records alone lead to the same state.
  void check_replica() const;
  bool serving() const { return serving_; }

 private:
  struct Session {
    uint64_t pid = 0;
    ClientKind kind = ClientKind::kMaps;
    std::shared_ptr<Connection> connection;  // null: absent
    int64_t deadline_us = 0;                 // for coming back
  };
  struct Asked {
    Event event;
    int64_t deadline_us;
  };
  struct Held {  // a segment
    OwnFd fd;
    Memory* memory;
  };
  using RequestName = std::pair<SessionId, uint64_t>;

  // larderd.cpp: Outside, and what happens around an event
  int64_t now_us() override { return scene_.now_us; }
  Status create_segment(const CreateSegment& effect) override;
  void drop_segment(SegmentId segment) override;
  bool append(std::span<const std::byte> record) override;
  void checkpoint(std::span<const std::byte> snapshot) override;
  void carry_out(Effect effect) override;
  void apply(Event event);
  bool append_torn(std::span<const std::byte> record);
  void replay_on_replica(std::span<const std::byte> record);
  void check_record(std::span<const std::byte> record) const;
  void check_quota(const CreateSegment& effect) const;
  Metadata journal_metadata() const;
  void replace_replica(std::span<const std::byte> snapshot);

  // larderd_effects.cpp
  void tell(const Reply& reply);
  void tell(const PoolCreated& created);
  void tell(const PoolDestroyed& destroyed);
  void tell(const SetOwnerWord& set) { scene_.books.word_changed(set); }
  void tell(const RunCopy& run);
  void tell(const FenceSession& fence) { fencing_[fence.session] = fence.fence; }
  void tell(const ExtentAdded& added) { scene_.books.extent_added(added); }
  void tell(const ExtentRemoved& removed) { scene_.books.extent_removed(removed); }
  void tell(const UnmapSegment& unmap);
  void tell(const CreateSegment&) {}
  void tell(const DropSegment&) {}
  void check_answer(const Client& client, const Event& asked, const ReplyBody& body, bool first);
  void send(Session& session, SessionId id, ToClient message);

  // larderd_start.cpp
  void start_fresh(std::vector<KeeperHost::Entry>& entries);
  void go_on(std::vector<KeeperHost::Entry>& entries, KeeperHost::Entry& journal);
  void adopt_segments(std::vector<KeeperHost::Entry>& entries);
  void adopt_sessions(std::vector<KeeperHost::Entry>& entries);
  void damage_a_copy(const Memory& journal, const JournalContents& contents);
  void step() { scene_.crash.pass(activity_, CrashPoint::kStep); }
  bool deposit_again();
  void close_entry(uint64_t key);

  // larderd_inputs.cpp
  struct Input;
  std::vector<Input> inputs();
  void take(const Hello& hello, const std::shared_ptr<Connection>& connection);
  void take(const Request& request, const std::shared_ptr<Connection>& connection);
  void take(const Unmapped& unmapped, const std::shared_ptr<Connection>& connection);
  void take(const Goodbye&, const std::shared_ptr<Connection>& connection);
  void read(const std::shared_ptr<Connection>& connection);
  void welcome_new(const std::shared_ptr<Connection>& connection);
  void end_session(SessionId id, bool said_goodbye);
  void close(const std::shared_ptr<Connection>& connection);
  void look_at_timers();
  void look_at_fences();
  void take_executor_news();
  void start_executor();
  void executor_has_exited();
  SessionId session_of(const Connection& connection) const;
  Client* client_of(uint64_t pid) const;

  Scene& scene_;
  std::shared_ptr<SimProcess> process_;
  std::optional<KeeperLink> link_;
  RecordedMachine machine_;
  std::unique_ptr<StateMachine> replica_;  // of records alone
  uint64_t cache_ = 0;
  bool serving_ = false;
  size_t activity_ = kStarting;
  // The journal.
  OwnFd journal_fd_;
  Memory* journal_memory_ = nullptr;
  std::optional<Journal> journal_;

  std::map<SegmentId, Held> segments_;
  std::map<SessionId, Session> sessions_;
  std::map<SessionId, OwnFd> evidence_;  // of sessions, also of ended ones that are not fenced
  std::map<SessionId, FenceClass> fencing_;
  std::vector<std::shared_ptr<Connection>> connections_;
  std::map<RequestName, Asked> asked_;
  std::map<std::pair<SegmentId, SessionId>, int64_t> unmapping_;  // deadlines
  std::set<SessionId> to_end_;
  std::map<uint64_t, RunCopy> copies_;
  Executor* executor_ = nullptr;
  OwnFd old_executor_;  // of the larderd before, until it has exited
};

uint64_t journal_key();
uint64_t segment_key(SegmentId segment);
uint64_t process_key(SessionId session);
uint64_t executor_key();

}  // namespace larder::sim
