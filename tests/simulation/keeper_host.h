// KeeperHost: the process larder-keeper of the simulated node, around the real daemon::Keeper.
//
// It can be killed and started again, and messages of a larderd that was killed can reach it late.
// Beside the real one it keeps its own list of what the keeper has to hold, and every answer must
// agree with it.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/keeper.h"
#include "tests/simulation/coverage.h"
#include "tests/simulation/process.h"

namespace larder::sim {

using Metadata = std::array<uint8_t, 64>;

// One connection of a larderd to one keeper process.
struct KeeperLink {
  int connection = -1;
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  std::shared_ptr<SimProcess> process;
};

class KeeperHost {
 public:
  struct Entry {
    uint64_t key;
    Metadata metadata;
    OwnFd fd;
  };
  struct Held {
    uint64_t memory;  // 0: a process
    Metadata metadata;
  };

  KeeperHost(Memories& memories, Coverage& coverage)
      : memories_(memories), coverage_(coverage), keeper_(std::make_unique<daemon::Keeper>()) {}

  // ------------------------------------------------------------------------ for larderd
  std::optional<KeeperLink> connect(std::shared_ptr<SimProcess> process);
  bool is_up(const KeeperLink& link) const { return keeper_ && link.incarnation == incarnation_; }
  Status hello(KeeperLink& link);
  // UNAVAILABLE once the keeper has been killed.
  Status put(const KeeperLink& link, uint64_t key, int fd, const Metadata& metadata);
  Status drop(const KeeperLink& link, uint64_t key);
  Result<std::vector<Entry>> list(const KeeperLink& link);
  // The message has been sent, and its sender is killed before it is read.
  void send_and_die(const KeeperLink& link, protocol::KeeperOp op, uint64_t key, int fd,
                    const Metadata& metadata);

  // ------------------------------------------------------------------------ for the world
  bool lives() const { return keeper_ != nullptr; }
  void kill();
  void start();
  bool has_messages() const { return !in_flight_.empty(); }
  void read_message();  // one of those in flight
  bool holds(uint64_t key) const { return held_.contains(key); }
  const std::map<uint64_t, Held>& held() const { return held_; }

 private:
  struct Message {
    KeeperLink link;
    protocol::KeeperRequest request;
    OwnFd fd;
  };
  daemon::Keeper::Answer handle(const KeeperLink& link, const protocol::KeeperRequest& request,
                                OwnFd fd);
  void note(const protocol::KeeperRequest& request, uint64_t memory);
  uint64_t memory_named(uint64_t key, int fd);

  Memories& memories_;
  Coverage& coverage_;
  std::unique_ptr<daemon::Keeper> keeper_;
  uint64_t incarnation_ = 1;
  int last_connection_ = 0;
  std::vector<Message> in_flight_;
  // What has to be true of the keeper.
  std::map<uint64_t, Held> held_;
  int owner_ = -1;
  uint64_t owner_epoch_ = 0;
  std::shared_ptr<SimProcess> owner_process_;
};

}  // namespace larder::sim
