// Client: an engine process with the client library, of one session at a time. It keeps books of
// its own of what it holds, as an engine does, and asks for nothing that these do not allow,
// except where it means to.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>

#include "tests/simulation/executor.h"
#include "tests/simulation/messages.h"
#include "tests/simulation/scene.h"

namespace larder::sim {

class Larderd;

// How it writes, and with it how its end can be told.
enum class ClientKind : uint8_t { kMaps, kMps, kUnprovable, kOnRequest };

struct HeldBlock {
  uint32_t group;
  BlockRef ref;
  uint64_t content;
};
// Blocks that serve a prefix, one hold on each. Assured: the prefix is there as long as they are.
struct HeldPrefix {
  Path path;
  std::vector<HeldBlock> blocks;
  bool assured;
};
struct Mapping {
  SegmentId segment;
  Memory* memory;
};

struct OpenedPool {
  PoolId id;
  PoolSpec spec;
  std::vector<GroupLayout> layouts;
  int64_t tokens;                                   // of a unit
  std::vector<std::pair<uint32_t, int32_t>> slots;  // of a unit: group, and which of its blocks
  std::vector<std::map<int32_t, BlockRef>> open;    // [group]: that it writes to
  std::vector<HeldPrefix> prefixes;
  std::vector<HeldBlock> loose;                             // holds of no prefix
  std::map<std::pair<uint32_t, uint32_t>, Mapping> mapped;  // by group and extent
  std::set<std::pair<uint32_t, uint32_t>> mapping;          // asked for
  std::vector<std::pair<uint32_t, BlockRef>> past;          // that were open, and released
  bool closing = false;                                     // ClosePool was sent
};

class Client {
 public:
  Client(Scene& scene, std::string tenant, Role role, ClientKind kind);

  // ------------------------------------------------------------------------- its process
  SimProcess& process() { return process_; }
  const SimProcess& process() const { return process_; }
  const std::string& tenant() const { return tenant_; }
  Role role() const { return role_; }
  ClientKind kind() const { return kind_; }
  SessionId session() const { return session_; }
  bool maps_memory() const { return kind_ != ClientKind::kOnRequest; }
  // It believes that it may write there, and it or what is left of it could.
  bool may_write(const BlockName& name) const;
  // Nothing that larderd may trust says when such a session can write no more; what it gets wrong
  // about one that has ended is not looked for.
  bool is_out_of_sight() const { return ended_ && kind_ == ClientKind::kUnprovable; }
  bool maps(const Memory* memory) const;
  void kill(bool with_child);
  void act_dying();  // what is left of it writes on, and goes

  // ---------------------------------------------------------------------------- its calls
  bool has_appends() const {
    return process_.runs() && !ring_.empty() && is_connected() && connection_->daemon_end;
  }
  const Append& next_append() const { return ring_.front(); }
  void append_done(bool ok);

  // ----------------------------------------------------------------------------- its life
  void act(Larderd* larderd);  // null: nobody listens
  void stop_reading() { reads_ = false; }
  void stop_unmapping() { unmaps_ = false; }
  void leave() { leaving_ = reads_ = true; }  // as soon as it can: for the end of a world
  // larderd ends the session; the client may not know it yet.
  void session_ends() { ended_ = true; }
  bool is_connected() const { return connection_ != nullptr && in_session_; }
  // Nothing is under way: its books and larderd's must be the same.
  bool is_settled() const;
  const std::map<PoolId, OpenedPool>& pools() const { return pools_; }

 private:
  using OnAnswer = std::function<void(const Answer&)>;
  struct Pending {
    Event event;
    OnAnswer on_answer;
    bool again = false;  // asked anew after a restart: later requests may have been carried out
  };
  // Blocks that are being filled on request, to be published.
  struct Filling {
    PoolId pool;
    Path path;
    int64_t first_unit;
    std::vector<BlockRef> blocks;
    size_t appends;
  };

  // client.cpp
  void connect(Larderd* larderd);
  void hang_up();
  void lose_session();
  bool read();
  void on_message(const Welcome& welcome);
  void on_message(const Stale&);
  void on_message(const Answer& answer);
  void on_message(const PleaseUnmap& please);
  void say_goodbye();
  void send(ToDaemon message) { connection_->to_daemon.push_back(std::move(message)); }
  void send_again();
  void unmap_one();
  template <typename Specific>
  void ask(Specific event, OnAnswer on_answer) {
    event.session = session_;
    event.request = ++last_number_;
    event.answered_below = pending_.empty() ? last_number_ : pending_.begin()->first;
    send(Request{last_number_, event});
    pending_.emplace(last_number_, Pending{std::move(event), std::move(on_answer), false});
  }
  void with_pool(PoolId id, const std::function<void(OpenedPool&)>& body);
  void write(OpenedPool& pool, uint32_t group, int32_t block, uint64_t content);
  void write_garbage();

  // client_requests.cpp
  void ask_something();
  void ask_about(OpenedPool& pool);
  void open_pool();
  void close_pool(OpenedPool& pool);
  void map(OpenedPool& pool, uint32_t group, uint32_t extent);
  void map_what_is_missing(OpenedPool& pool);
  void resize(OpenedPool& pool);
  void evict(OpenedPool& pool);
  void administer();
  void ask_nonsense(OpenedPool& pool);

  // client_blocks.cpp
  bool is_mapped(OpenedPool& pool, uint32_t group, int32_t block);
  void allocate(OpenedPool& pool);
  void release_open(OpenedPool& pool);
  void release_held(OpenedPool& pool);
  void release_past(OpenedPool& pool);
  void publish(OpenedPool& pool);
  std::optional<std::vector<BlockRef>> take_for(OpenedPool& pool, int64_t num_units);
  void put_back(OpenedPool& pool, const std::vector<BlockRef>& blocks);
  void fill(OpenedPool& pool, Filling filling);
  void send_publish(const Filling& filling);
  void look_up(OpenedPool& pool);
  void hold(OpenedPool& pool, const Path& path, int64_t first_unit,
            const std::vector<BlockRef>& blocks, bool assured);
  void copy(OpenedPool& pool);

  Scene& scene_;
  const std::string tenant_;
  const Role role_;
  const ClientKind kind_;
  SimProcess process_;
  std::shared_ptr<Connection> connection_;
  bool in_session_ = false;  // it was welcomed on this connection
  uint64_t cache_ = 0;
  SessionId session_{0};
  uint64_t last_number_ = 0;
  std::map<uint64_t, Pending> pending_;
  std::map<PoolId, OpenedPool> pools_;
  std::deque<Append> ring_;
  std::optional<Filling> filling_;
  std::vector<PleaseUnmap> to_unmap_;
  bool short_of_blocks_ = false;
  bool reads_ = true;
  bool unmaps_ = true;
  bool returns_ = true;
  bool leaving_ = false;
  bool ended_ = false;
};

}  // namespace larder::sim
