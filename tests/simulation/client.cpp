#include "tests/simulation/client.h"

#include <algorithm>

#include "tests/simulation/larderd.h"
#include "tests/simulation/violation.h"

namespace larder::sim {

Client::Client(Scene& scene, std::string tenant, Role role, ClientKind kind)
    : scene_(scene),
      tenant_(std::move(tenant)),
      role_(role),
      kind_(kind),
      process_(++scene.last_pid) {}

// --------------------------------------------------------------------------------- its process

bool Client::may_write(const BlockName& name) const {
  if (cache_ != scene_.cache || process_.gone() || is_out_of_sight()) return false;
  // The executor writes for it, and looks at the owner word first.
  if (kind_ == ClientKind::kOnRequest && (!process_.runs() || ended_)) return false;
  const auto pool = pools_.find(name.pool);
  if (pool == pools_.end() || pool->second.closing) return false;
  return pool->second.open[name.group].contains(name.block);
}

bool Client::maps(const Memory* memory) const {
  if (process_.gone() || is_out_of_sight()) return false;
  for (const auto& [id, pool] : pools_)
    for (const auto& [extent, mapping] : pool.mapped)
      if (mapping.memory == memory) return true;
  return false;
}

void Client::kill(bool with_child) {
  if (with_child) process_.fork();
  process_.kill();
  scene_.coverage.add(with_child ? Fault::kClientKilledWithChild : Fault::kClientKilled);
}

void Client::act_dying() {
  if (scene_.chance.one_in(2)) return write_garbage();
  if (!process_.exited()) {
    process_.exit();
  } else if (process_.has_child()) {
    if (!scene_.chance.one_in(8)) return write_garbage();
    process_.child_exits();
  }
  if (process_.gone() && connection_) hang_up();
}

void Client::write(OpenedPool& pool, uint32_t group, int32_t block, uint64_t content) {
  const GroupLayout& layout = pool.layouts[group];
  const int64_t extent = layout.extent_of(block);
  const auto mapping = pool.mapped.find({group, static_cast<uint32_t>(extent)});
  SIM_CHECK(mapping != pool.mapped.end(), "not mapped", block);
  uint64_t& there =
      mapping->second.memory->blocks.at(static_cast<size_t>(block - layout.first_block(extent)));
  there = content;
  if (cache_ != scene_.cache) return;
  const BlockName name{pool.id, group, block};
  scene_.check_may_write(name, session_);
  const uint64_t* expected = scene_.books.content(name);
  SIM_CHECK(expected == nullptr || expected == &there, "written to other memory: block", block);
}

void Client::write_garbage() {
  if (!maps_memory() || is_out_of_sight() || pools_.empty()) return;
  OpenedPool& pool = scene_.chance.pick(pools_)->second;
  const auto group = static_cast<uint32_t>(scene_.chance.below(pool.open.size()));
  if (pool.closing || pool.open[group].empty()) return;
  const int32_t block = scene_.chance.pick(pool.open[group])->first;
  const auto extent = static_cast<uint32_t>(pool.layouts[group].extent_of(block));
  if (pool.mapped.contains({group, extent}))
    write(pool, group, block, scene_.chance.next() & ~uint64_t{1});
}

// ------------------------------------------------------------------------------------ its life

void Client::act(Larderd* larderd) {
  if (!process_.runs()) return act_dying();
  if (!connection_) return connect(larderd);
  if (reads_ && !connection_->to_client.empty()) {
    while (read() && scene_.chance.one_in(2)) {
    }
    return;
  }
  if (!connection_->daemon_end) return hang_up();
  if (!in_session_) return;
  if (unmaps_ && !to_unmap_.empty() && scene_.chance.one_in(4)) return unmap_one();
  if (leaving_) {
    if (pending_.empty() || scene_.chance.one_in(8)) say_goodbye();
    return;
  }
  if (pending_.size() >= (reads_ ? 4u : 12u)) return write_garbage();
  if (scene_.chance.one_in(1000) && !filling_) return say_goodbye();
  ask_something();
}

void Client::connect(Larderd* larderd) {
  if (!scene_.chance.one_in(returns_ || leaving_ ? 4 : 64)) return write_garbage();
  if (larderd == nullptr) return;
  connection_ = larderd->accept(*this);
  if (connection_) send(Hello{cache_, session_});
}

void Client::hang_up() {
  connection_->client_end = false;
  connection_.reset();
  in_session_ = false;
  to_unmap_.clear();  // it will be told again
  reads_ = true;
  returns_ = !scene_.faults || !scene_.chance.one_in(8);
  if (!returns_) scene_.coverage.add(Fault::kClientNeverReturns);
}

// It lets go of everything, and begins anew.
void Client::lose_session() {
  cache_ = 0;
  session_ = SessionId{0};
  pools_.clear();
  pending_.clear();
  ring_.clear();
  filling_.reset();
  unmaps_ = true;
  ended_ = false;
}

void Client::say_goodbye() {
  for (auto& [id, pool] : pools_) pool.mapped.clear();
  send(Goodbye{});
  lose_session();
  hang_up();
  process_.exit();
}

bool Client::read() {
  if (!connection_ || connection_->to_client.empty()) return false;
  const ToClient message = std::move(connection_->to_client.front());
  connection_->to_client.pop_front();
  std::visit([this](const auto& specific) { on_message(specific); }, message);
  return true;
}

void Client::on_message(const Welcome& welcome) {
  SIM_CHECK(!welcome.resumed || (welcome.session == session_ && welcome.cache == cache_),
            "another session", value(session_));
  in_session_ = true;
  ended_ = false;  // where larderd was killed before that was recorded
  if (welcome.resumed) return send_again();
  lose_session();
  cache_ = welcome.cache;
  session_ = welcome.session;
}

// What has no answer is asked again, in its order and under its number.
void Client::send_again() {
  for (auto& [number, pending] : pending_) {
    pending.again = true;
    send(Request{number, pending.event});
  }
}

void Client::on_message(const Stale&) {
  lose_session();
  hang_up();
}

void Client::on_message(const Answer& answer) {
  const auto found = pending_.find(answer.number);
  SIM_CHECK(found != pending_.end(), "an answer to nothing that is asked", answer.number);
  const Pending pending = std::move(found->second);
  pending_.erase(found);
  if (cache_ == scene_.cache) scene_.books.request_over(session_, answer.number);
  Answer marked = answer;
  marked.again = pending.again;
  pending.on_answer(marked);
}

void Client::on_message(const PleaseUnmap& please) { to_unmap_.push_back(please); }

void Client::unmap_one() {
  const PleaseUnmap please = to_unmap_.back();
  to_unmap_.pop_back();
  with_pool(please.pool, [&](OpenedPool& pool) {
    const auto mapping = pool.mapped.find({please.group, please.index});
    if (mapping != pool.mapped.end() && mapping->second.segment == please.segment)
      pool.mapped.erase(mapping);
  });
  send(Unmapped{please.segment});
}

void Client::with_pool(PoolId id, const std::function<void(OpenedPool&)>& body) {
  if (const auto pool = pools_.find(id); pool != pools_.end()) body(pool->second);
}

bool Client::is_settled() const {
  return is_connected() && process_.runs() && connection_->daemon_end && pending_.empty() &&
         connection_->to_client.empty() && connection_->to_daemon.empty() && !filling_;
}

void Client::append_done(bool ok) {
  if (!ok && ended_) {  // it will be told that its session is no more
    ring_.clear();
    filling_.reset();
    return;
  }
  ring_.pop_front();
  SIM_CHECK(ok, "an append to a block of its own was refused", value(session_));
  SIM_CHECK(filling_ && filling_->appends > 0, "an append of nobody");
  if (--filling_->appends > 0) return;
  const Filling filled = *std::exchange(filling_, std::nullopt);
  send_publish(filled);
}

}  // namespace larder::sim
