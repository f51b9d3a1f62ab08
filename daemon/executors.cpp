#include "daemon/executors.h"

#include <memory>
#include <utility>

#include <spdlog/spdlog.h>

#include "protocol/keeper_record.h"

namespace larder::daemon {
Executors::Executors(boost::asio::io_context& loop, std::string executable, std::string log_level)
    : loop_(loop), executable_(std::move(executable)), log_level_(std::move(log_level)) {
  (void)of(kHostDevice);
}

uint64_t Executors::id_of(const std::string& device) {
  if (device == kHostDevice) return 0;
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const char letter : device) hash = (hash ^ static_cast<uint8_t>(letter)) * 0x100000001b3ull;
  return protocol::keeper_id(hash) | 1;
}

void Executors::set_predecessors(std::map<uint64_t, OwnFd> pidfds) {
  predecessors_ = std::move(pidfds);
  for (const auto& [device, link] : links_)
    if (auto node = predecessors_.extract(id_of(device)); !node.empty())
      link->set_predecessor(std::move(node.mapped()));
}

void Executors::start(Handlers handlers) {
  handlers_ = std::move(handlers);
  started_ = true;
  for (const auto& [device, link] : links_) link->start(handlers_of(device));
}

ExecutorLink& Executors::of(const std::string& device) {
  const auto found = links_.find(device);
  if (found != links_.end()) return *found->second;
  auto link = std::make_unique<ExecutorLink>(loop_, executable_, log_level_,
                                             device == kHostDevice ? "" : device);
  ExecutorLink& made = *link;
  if (auto node = predecessors_.extract(id_of(device)); !node.empty())
    made.set_predecessor(std::move(node.mapped()));
  links_.emplace(device, std::move(link));
  if (started_) made.start(handlers_of(device));
  return made;
}

void Executors::retire(const std::string& device) {
  auto node = links_.extract(device);
  if (node.empty()) return;
  spdlog::info("event=executor_retired device={}", device);
  retired_restarts_ += node.mapped()->restarts();
  node.mapped()->abandon();
  retired_.push_back(std::move(node.mapped()));
}

void Executors::reap() {
  std::erase_if(retired_, [](const auto& link) { return link->has_left(); });
}

ExecutorLink::Handlers Executors::handlers_of(const std::string& device) {
  return {[this, device] { handlers_.on_started(device); },
          [device] { spdlog::info("event=executor_ready device={}", device); },
          [this, device] { handlers_.on_died(device); },
          [this](const protocol::Copied& copied) { handlers_.on_copied(copied); },
          [this](const protocol::BrokenRing& broken) { handlers_.on_broken_ring(broken); },
          [this](const protocol::ImportDone& done) { handlers_.on_imported(done); }};
}

void Executors::when_idle_everywhere(uint64_t session, std::function<void()> then) {
  std::vector<ExecutorLink*> running;
  for (const auto& [device, link] : links_)
    if (link->may_run()) running.push_back(link.get());
  if (running.empty()) return then();
  // Shared by the answers that are still to come.
  const auto waiting =
      std::make_shared<std::pair<size_t, std::function<void()>>>(running.size(), std::move(then));
  for (ExecutorLink* link : running)
    link->when_idle(session, [waiting] {
      if (--waiting->first == 0) waiting->second();
    });
}

void Executors::end_if_stuck(uint64_t session) {
  for (const auto& [device, link] : links_) link->end_if_stuck(session);
}

bool Executors::may_run() const {
  for (const auto& [device, link] : links_)
    if (link->may_run()) return true;
  return false;
}

uint64_t Executors::restarts() const {
  uint64_t sum = retired_restarts_;
  for (const auto& [device, link] : links_) sum += link->restarts();
  return sum;
}

std::vector<protocol::ExecutorInfo> Executors::list() const {
  std::vector<protocol::ExecutorInfo> result;
  for (const auto& [device, link] : links_)
    result.push_back({device, link->pid(), link->restarts(), link->ready()});
  return result;
}

std::optional<std::string> Executors::not_ready() const {
  for (const auto& [device, link] : links_)
    if (!link->ready())
      return device == kHostDevice ? "the executor is not ready"
                                   : "the executor of " + device + " is not ready";
  return std::nullopt;
}

std::optional<std::string> Executors::not_live() const {
  for (const auto& [device, link] : links_)
    if (link->cannot_start())
      return "the executor of " + device + " failed to start " +
             std::to_string(link->failed_starts()) + " times in a row";
  return std::nullopt;
}

}  // namespace larder::daemon
