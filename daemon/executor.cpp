#include "daemon/executor.h"

#include <chrono>
#include <cstring>
#include <poll.h>
#include <span>
#include <sys/uio.h>
#include <type_traits>
#include <utility>

#include <boost/asio/post.hpp>
#include <spdlog/spdlog.h>

#include "daemon/pool_store.h"
#include "kernels/kernel_table.h"
#include "kernels/run_on.h"
#include "larder/check.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

constexpr size_t kMaxQueuedReports = 65536;
// So many records of one session are run before others get their turn.
constexpr int kRecordsPerTurn = 4;
constexpr auto kWordPoll = std::chrono::microseconds(100);

template <typename Command>
constexpr bool kCarriesFds =
    std::is_same_v<Command, protocol::AddGroup> || std::is_same_v<Command, protocol::AddSegments> ||
    std::is_same_v<Command, protocol::AddSession> || std::is_same_v<Command, protocol::AddImport>;

// Never blocks: the client holds the same open file and could make it a blocking one at any time.
void clear_eventfd(int fd) {
  uint64_t count = 0;
  const iovec part{&count, sizeof count};
  (void)!::preadv2(fd, &part, 1, -1, RWF_NOWAIT);
}

SharedMapping map_arena(int fd, uint64_t size_bytes) {
  return SharedMapping::map(fd, static_cast<int64_t>(size_bytes), true);
}

std::span<std::byte> bytes_of(const SharedMapping& mapping) {
  return {mapping.data(), static_cast<size_t>(mapping.size_bytes())};
}

std::vector<float> read_key_offsets(const protocol::AttentionGroup& group, int fd) {
  std::vector<float> offsets(static_cast<size_t>(group.num_layers) *
                             static_cast<size_t>(group.num_kv_heads) *
                             static_cast<size_t>(group.k_dim));
  const auto bytes = offsets.size() * sizeof(float);
  const SharedMapping mapping = SharedMapping::map(fd, static_cast<int64_t>(bytes), false);
  std::memcpy(offsets.data(), mapping.data(), bytes);
  return offsets;
}

// Until what a call has enqueued is done.
Status finish(kernels::DeviceCalls* device) {
  return device == nullptr ? Status() : device->wait();
}

}  // namespace

Executor::Ring::Ring(boost::asio::io_context& loop, SharedMapping arena_mapping, OwnFd wake_fd)
    : mapping(std::move(arena_mapping)),
      arena(bytes_of(mapping)),
      server(arena),
      wake(loop, wake_fd.release()),
      retry(loop) {}

Executor::Executor(boost::asio::io_context& loop, OwnFd larderd_socket, const std::string& device)
    : loop_(loop),
      larderd_(std::make_shared<Connection>(loop, std::move(larderd_socket), kMaxQueuedReports)) {
  use_device(device);
  larderd_->start({[this](protocol::Received received) { handle(std::move(received)); },
                   [this] { loop_.stop(); }});
  report(protocol::Ready{});
}

Executor::~Executor() { larderd_->close(); }

void Executor::report(const protocol::ExecutorReport& report) {
  larderd_->send(protocol::encode(report));
}

// larderd is ours: a message of its that cannot be used is a bug, and so is an id that it has not
// told us about.
void Executor::handle(protocol::Received received) {
  LARDER_CHECK(received.kind == protocol::Received::Kind::kMessage, received.status.to_string());
  const auto command = protocol::decode_command(received.bytes);
  LARDER_CHECK(command.ok(), command.status().to_string());
  std::visit(
      [&](const auto& body) {
        if constexpr (kCarriesFds<std::decay_t<decltype(body)>>) {
          handle(body, std::move(received.fds));
        } else {
          handle(body);
        }
      },
      *command);
}

void Executor::handle(const protocol::AddGroup& command, std::vector<OwnFd> fds) {
  protocol::GroupSpec spec = command.spec;
  LARDER_CHECK(fds.size() == 2 || fds.size() == 3, fds.size());
  if (auto* attention = std::get_if<protocol::AttentionGroup>(&spec.kind);
      attention != nullptr && fds.size() == 3)
    attention->key_offsets = read_key_offsets(*attention, fds[2].get());
  const auto pool =
      pools_.try_emplace(command.pool, Pool{{}, SharedCounters::adopt(std::move(fds[1]))}).first;
  std::vector<MappedGroup>& groups = pool->second.groups;
  LARDER_CHECK(command.group == groups.size(), command.group);
  int64_t total_bytes = 0;
  for (const int64_t bytes : command.layout.segment_bytes) total_bytes += bytes;
  // Registered memory must be writable, though nobody here writes it.
  groups.push_back(
      {view_group(spec).value(), command.layout, memory().reserve(total_bytes),
       SharedMapping::map(fds[0].get(), OwnerTable::size_bytes(command.layout.num_ids()),
                          device_ != nullptr),
       device_.get()});
  if (device_ != nullptr) prepare_for_device(groups.back());
}

void Executor::handle(const protocol::AddSegments& command, std::vector<OwnFd> fds) {
  LARDER_CHECK(fds.size() == command.size_bytes.size(), fds.size());
  MappedGroup& group = pools_.at(command.pool).groups.at(command.group);
  for (size_t i = 0; i < fds.size(); ++i)
    group.memory->map_at(
        (command.first_index + static_cast<int64_t>(i)) * group.layout.extent_bytes, fds[i].get(),
        command.size_bytes[i]);
}

void Executor::handle(const protocol::DropExtent& command) {
  MappedGroup& group = pools_.at(command.pool).groups.at(command.group);
  group.memory->unmap_at(command.index * group.layout.extent_bytes,
                         group.layout.segment_bytes.at(command.index));
}

void Executor::handle(const protocol::AddSession& command, std::vector<OwnFd> fds) {
  LARDER_CHECK(fds.size() == 2, fds.size());
  auto ring = std::make_unique<Ring>(loop_, map_arena(fds[0].get(), command.arena_bytes),
                                     std::move(fds[1]));
  if (device_ != nullptr) prepare_for_device(*ring);
  ring->pools.insert(command.pools.begin(), command.pools.end());
  rings_.insert_or_assign(command.session, std::move(ring));
  run_ring(command.session);
}

void Executor::handle(const protocol::DropPool& command) { pools_.erase(command.pool); }

void Executor::handle(const protocol::AttachPool& command) {
  const auto ring = rings_.find(command.session);
  if (ring != rings_.end()) ring->second->pools.insert(command.pool);
}

void Executor::handle(const protocol::DetachPool& command) {
  const auto ring = rings_.find(command.session);
  if (ring != rings_.end()) ring->second->pools.erase(command.pool);
}

void Executor::handle(const protocol::DropSession& command) {
  const auto ring = rings_.find(command.session);
  if (ring == rings_.end()) return;
  report_drains(*ring->second);
  rings_.erase(ring);
}

void Executor::handle(const protocol::Drain& command) {
  const auto ring = rings_.find(command.session);
  if (ring == rings_.end() || ring->second->broken || ring->second->server.num_pending() == 0)
    return report(protocol::Drained{command.ticket});
  ring->second->drains.push_back(command.ticket);
}

void Executor::report_drains(Ring& ring) {
  for (const uint64_t ticket : std::exchange(ring.drains, {})) report(protocol::Drained{ticket});
}

void Executor::handle(const protocol::CopyBlocks& command) {
  report(protocol::Copied{command.copy, copy_blocks(command)});
}

Status Executor::copy_blocks(const protocol::CopyBlocks& command) {
  const auto pool = pools_.find(command.pool);
  if (pool == pools_.end()) return {ErrorCode::kNotFound, "the pool is gone"};
  const MappedGroup& group = pool->second.groups.at(command.group);
  kernels::CopyParams params;
  params.view = view_blocks(group.view, group.layout, group.memory->base());
  params.from = command.from.data();
  params.to = command.to.data();
  params.count = static_cast<int64_t>(command.from.size());
  if (Status status = kernels::run_on(group.device, params); !status.ok()) return status;
  return finish(group.device);
}

Executor::Turn Executor::serve_ring(uint64_t session, Ring& ring, int max_records) {
  if (ring.broken) return Turn::kBroken;
  for (int i = 0; i < max_records; ++i) {
    const auto submission = ring.server.peek();
    if (!submission) {
      ring.broken = true;
      report_drains(ring);
      report(protocol::BrokenRing{session, submission.status().message()});
      return Turn::kBroken;
    }
    if (!submission->has_value()) return Turn::kEmpty;
    if (!ring.server.can_complete()) return Turn::kWaiting;
    const protocol::Submission& record = **submission;
    if (record.wait_word != protocol::kNoWord && record.wait_word >= protocol::kTimelineWords) {
      ring.server.complete(
          record, Status(ErrorCode::kInvalidArgument,
                         "wait_word is " + std::to_string(record.wait_word) + ", there are " +
                             std::to_string(protocol::kTimelineWords)));
      continue;
    }
    if (!ring.server.wait_reached(record)) return Turn::kWaiting;
    if (has_commands()) return Turn::kMore;
    ring.server.complete(record, run_record(session, ring, record));
  }
  return ring.server.num_pending() > 0 ? Turn::kMore : Turn::kEmpty;
}

// What larderd has told a client it has told us before, but a record can overtake it.
bool Executor::has_commands() {
  pollfd entry{larderd_->fd(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

Status Executor::run_record(uint64_t session, Ring& ring, const protocol::Submission& record) {
  const auto pool = pools_.find(record.pool);
  if (pool == pools_.end() || !ring.pools.contains(record.pool))
    return {ErrorCode::kNotFound,
            "pool " + std::to_string(record.pool) + " is not open in this session"};
  if (record.group >= pool->second.groups.size())
    return {ErrorCode::kNotFound, "group is " + std::to_string(record.group) + ", the pool has " +
                                      std::to_string(pool->second.groups.size())};
  const MappedGroup& group = pool->second.groups[record.group];
  Result<SubmissionWork> work =
      run_submission(record, ring.arena, group, SessionId{session}, ring.imports);
  if (work)
    if (Status status = finish(group.device); !status.ok()) work = status;
  check_device();
  PoolCounters& counters = *pool->second.counters;
  if (!work) {
    counters.refusals.fetch_add(1, std::memory_order_relaxed);
    return work.status();
  }
  counters.appended_tokens.fetch_add(work->appended_tokens, std::memory_order_relaxed);
  counters.attended_rows.fetch_add(work->attended_rows, std::memory_order_relaxed);
  return {};
}

void Executor::run_ring(uint64_t session) {
  const auto found = rings_.find(session);
  if (found == rings_.end()) return;
  Ring& ring = *found->second;
  switch (serve_ring(session, ring, kRecordsPerTurn)) {
    case Turn::kEmpty:
      report_drains(ring);
      return sleep_ring(session, ring);
    case Turn::kMore:
      boost::asio::post(loop_, [this, session] { run_ring(session); });
      return;
    case Turn::kWaiting:
      ring.retry.expires_after(kWordPoll);
      ring.retry.async_wait([this, session](const boost::system::error_code& error) {
        if (!error) run_ring(session);
      });
      return;
    case Turn::kBroken:
      return;
  }
}

void Executor::sleep_ring(uint64_t session, Ring& ring) {
  ring.server.set_sleeping(true);
  if (ring.server.num_pending() > 0) {
    ring.server.set_sleeping(false);
    boost::asio::post(loop_, [this, session] { run_ring(session); });
    return;
  }
  ring.wake.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                       [this, session](const boost::system::error_code& error) {
                         const auto found = rings_.find(session);
                         if (error || found == rings_.end()) return;
                         clear_eventfd(found->second->wake.native_handle());
                         found->second->server.set_sleeping(false);
                         run_ring(session);
                       });
}

}  // namespace larder::daemon
