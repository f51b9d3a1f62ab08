// Executor: the process that runs kernels for clients, on memory that larderd has given it.
//
// It holds nothing that cannot be given again: larderd restarts it and tells it everything. It
// trusts larderd, and nobody's ring. Thread rule: the loop's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "allocator/memory_devices.h"
#include "daemon/connection.h"
#include "daemon/pool_counters.h"
#include "daemon/submission.h"
#include "protocol/executor_messages.h"

namespace larder::daemon {

class Executor {
 public:
  // Serves until the socket to larderd closes, which stops the loop.
  // `device`: the GPU's UUID; empty: host memory alone. Throws std::runtime_error with the reason
  // when the GPU cannot be used, and from the loop when its context is lost: nothing of it can be
  // mended in this process, and larderd starts another.
  Executor(boost::asio::io_context& loop, OwnFd larderd_socket, const std::string& device);
  ~Executor();

 private:
  struct Pool {
    std::vector<MappedGroup> groups;
    SharedCounters counters;
  };
  // A session's ring. Handlers on the loop name it by id and look it up again.
  struct Ring {
    Ring(boost::asio::io_context& loop, SharedMapping arena_mapping, OwnFd wake);
    SharedMapping mapping;
    kernels::RegisteredMemory registered;  // the arena, for a GPU
    Imports imports;
    protocol::Arena arena;
    protocol::ArenaServer server;
    boost::asio::posix::stream_descriptor wake;  // eventfd
    boost::asio::steady_timer retry;             // while it waits for a timeline word
    std::set<uint64_t> pools;
    std::vector<uint64_t> drains;  // tickets to report when the ring is empty
    bool broken = false;
  };

  void handle(protocol::Received received);
  void handle(const protocol::AddGroup& command, std::vector<OwnFd> fds);
  void handle(const protocol::AddSegments& command, std::vector<OwnFd> fds);
  void handle(const protocol::AddSession& command, std::vector<OwnFd> fds);
  void handle(const protocol::DropExtent& command);
  void handle(const protocol::DropPool& command);
  void handle(const protocol::AttachPool& command);
  void handle(const protocol::DetachPool& command);
  void handle(const protocol::DropSession& command);
  void handle(const protocol::Drain& command);
  void handle(const protocol::CopyBlocks& command);
  void handle(const protocol::AddImport& command, const std::vector<OwnFd>& fds);
  void handle(const protocol::RemoveImport& command);

  void use_device(const std::string& device);
  void prepare_for_device(MappedGroup& group);
  void prepare_for_device(Ring& ring);
  void check_device() const;
  const MemoryProvider& memory() const { return *memory_; }
  enum class Turn { kEmpty, kMore, kWaiting, kBroken };
  Turn serve_ring(uint64_t session, Ring& ring, int max_records);
  void run_ring(uint64_t session);
  void sleep_ring(uint64_t session, Ring& ring);
  bool has_commands();
  void report_drains(Ring& ring);
  Status run_record(uint64_t session, Ring& ring, const protocol::Submission& submission);
  Status copy_blocks(const protocol::CopyBlocks& command);
  void report(const protocol::ExecutorReport& report);

  boost::asio::io_context& loop_;
  std::shared_ptr<Connection> larderd_;
  MemoryDevices devices_;
  const MemoryProvider* memory_ = nullptr;
  std::unique_ptr<kernels::DeviceCalls> device_;  // outlives pools and rings
  SharedMapping faults_;                          // one kernels::CallFaults
  kernels::RegisteredMemory device_faults_;
  std::map<uint64_t, Pool> pools_;
  std::map<uint64_t, std::unique_ptr<Ring>> rings_;
};

}  // namespace larder::daemon
