#include "tests/simulation/executor.h"

#include <algorithm>

#include "tests/simulation/client.h"
#include "tests/simulation/violation.h"

namespace larder::sim {
namespace {

bool names(const RunCopy& copy, const BlockName& name) {
  return copy.pool == name.pool && copy.group == name.group &&
         (std::count(copy.from.begin(), copy.from.end(), name.block) > 0 ||
          std::count(copy.to.begin(), copy.to.end(), name.block) > 0);
}

}  // namespace

bool Executor::works_on(const BlockName& name) const {
  if (process_.exited() || cache_ != scene_.cache) return false;
  if (running_) {
    const auto* copy = std::get_if<RunCopy>(&running_->call);
    if (copy != nullptr && names(*copy, name)) return true;
  }
  return !orphan_ && std::any_of(queue_.begin(), queue_.end(),
                                 [&](const RunCopy& copy) { return names(copy, name); });
}

CopyDone Executor::take_news() {
  CopyDone done = std::move(news_.front());
  news_.pop_front();
  return done;
}

bool Executor::act() {
  if (process_.exited()) return false;
  if (cache_ != scene_.cache) orphan_ = true;
  if (!process_.runs()) {  // SIGKILL: what it had begun is left half done
    running_.reset();
    queue_.clear();
    process_.exit();
    return true;
  }
  if (running_) {
    finish();
    return true;
  }
  if (!orphan_) return begin();
  process_.exit();
  return true;
}

bool Executor::begin() {
  std::vector<Client*> waiting;
  for (const auto& client : scene_.clients)
    if (client->has_appends()) waiting.push_back(client.get());
  if (!queue_.empty() && (waiting.empty() || scene_.chance.one_in(2))) {
    running_ = Running{queue_.front(), nullptr, SessionId{0}};
    queue_.pop_front();
    return true;
  }
  if (waiting.empty()) return false;
  Client* client = *scene_.chance.pick(waiting);
  const Append& append = client->next_append();
  // What makes plain block ids safe: the word says whether this session may write there.
  if (!scene_.books.pools().contains(append.block.pool) ||
      !may_append(scene_.books.word(append.block), client->session())) {
    client->append_done(false);
    return true;
  }
  running_ = Running{append, client, client->session()};
  return true;
}

void Executor::finish() {
  const Running done = *std::exchange(running_, std::nullopt);
  if (cache_ != scene_.cache) return;  // in memory that nobody else has any more
  if (const auto* copy = std::get_if<RunCopy>(&done.call)) return run(*copy);
  const Append& append = std::get<Append>(done.call);
  scene_.check_may_write(append.block, done.session);
  uint64_t* content = scene_.books.content(append.block);
  SIM_CHECK(content != nullptr, "an append to memory that is gone", append.block.block);
  *content = append.content;
  // The completion is in shared memory: a client that has gone on without it does not look.
  if (done.client->session() == done.session && done.client->has_appends())
    done.client->append_done(true);
}

void Executor::run(const RunCopy& copy) {
  const bool fails = scene_.faults && scene_.chance.one_in(16);
  for (size_t i = 0; i < copy.to.size(); ++i) {
    const BlockName to{copy.pool, copy.group, copy.to[i]};
    const uint64_t word = scene_.books.word(to);
    SIM_CHECK((word & 3) != static_cast<uint64_t>(OwnerState::kPublished),
              "a copy writes to a published block", copy.to[i]);
    const uint64_t* from = scene_.books.content({copy.pool, copy.group, copy.from[i]});
    uint64_t* target = scene_.books.content(to);
    SIM_CHECK(from != nullptr && target != nullptr, "a copy of memory that is gone", copy.copy);
    if (fails && scene_.chance.one_in(2)) break;
    *target = *from;
  }
  if (fails) scene_.coverage.add(Fault::kCopyFails);
  const CopyDone done{copy.copy,
                      fails ? Status(ErrorCode::kUnavailable, "the copy failed") : Status()};
  news_.push_back(done);
  if (!scene_.faults || !scene_.chance.one_in(16)) return;
  news_.push_back({copy.copy, scene_.chance.one_in(2)
                                  ? Status()
                                  : Status(ErrorCode::kInternal, "said a second time")});
  scene_.coverage.add(Fault::kCopyDoneTwice);
}

}  // namespace larder::sim
