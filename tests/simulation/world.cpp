#include "tests/simulation/world.h"

#include <algorithm>

#include "tests/simulation/violation.h"
#include "tests/simulation/workload.h"

namespace larder::sim {

World::World(uint64_t seed, uint64_t episode, const Options& options, Coverage& coverage)
    : scene_(seed, episode, options, coverage),
      population_(2 + static_cast<size_t>(scene_.chance.below(11))),
      checked_at_(coverage.num_events),
      compared_at_(coverage.num_events) {}

void World::step() {
  pass_time();
  if (scene_.faults) break_something();
  change_population();
  if (!scene_.clients.empty()) {
    Client& client = **scene_.chance.pick(scene_.clients);
    client.act(larderd_ && larderd_->serving() ? larderd_.get() : nullptr);
  }
  if (larderd_) {
    run_larderd(1 + scene_.chance.below(3));
  } else if (scene_.chance.one_in(4)) {
    start_larderd();
  }
  run_others();
  check();
}

void World::pass_time() {
  scene_.now_us += scene_.chance.below(20'000);
  if (!scene_.faults || !scene_.chance.one_in(800)) return;
  if (scene_.chance.one_in(2)) {
    scene_.now_us += scene_.chance.below(60'000'000);
    scene_.coverage.add(Fault::kClockJumpsForward);
  } else {
    scene_.now_us -= scene_.chance.below(20'000'000);
    scene_.coverage.add(Fault::kClockJumpsBack);
  }
}

void World::change_population() {
  forget_the_gone();
  if (draining_) return;
  if (scene_.chance.one_in(3000)) population_ = 2 + static_cast<size_t>(scene_.chance.below(11));
  if (scene_.clients.size() >= population_ || !scene_.chance.one_in(8)) return;
  constexpr ClientKind kKinds[] = {ClientKind::kMaps, ClientKind::kMaps,
                                   ClientKind::kMaps, ClientKind::kOnRequest,
                                   ClientKind::kMps,  ClientKind::kOnRequest};
  ClientKind kind = kKinds[scene_.chance.below(std::size(kKinds))];
  if (scene_.chance.one_in(24)) kind = ClientKind::kUnprovable;
  constexpr Role kRoles[] = {Role::kAppend, Role::kAppend, Role::kAppend, Role::kAdmin};
  Role role = kRoles[scene_.chance.below(std::size(kRoles))];
  if (kind == ClientKind::kOnRequest && scene_.chance.one_in(4)) role = Role::kRead;
  const char* tenant = kTenants[scene_.chance.below(std::size(kTenants))];
  scene_.clients.push_back(std::make_unique<Client>(scene_, tenant, role, kind));
}

void World::forget_the_gone() {
  std::erase_if(scene_.clients, [&](const std::unique_ptr<Client>& client) {
    if (!client->process().gone()) return false;
    if (larderd_ && larderd_->knows(*client)) return false;
    return std::ranges::none_of(
        scene_.executors, [&](const auto& executor) { return executor->works_for(client.get()); });
  });
  std::erase_if(scene_.executors, [](const std::unique_ptr<Executor>& executor) {
    return executor->orphan() && executor->process().exited();
  });
}

// ------------------------------------------------------------------------------------------ faults

void World::break_something() {
  Chance& chance = scene_.chance;
  if (!scene_.clients.empty() && chance.one_in(150)) {
    Client& client = **chance.pick(scene_.clients);
    if (client.process().runs()) {
      const int what = chance.below(8);
      if (what < 4) {
        client.kill(what == 0);
      } else if (what == 4) {
        client.stop_reading();
        scene_.coverage.add(Fault::kClientStopsReading);
      } else if (what == 5) {
        client.stop_unmapping();
        scene_.coverage.add(Fault::kClientStopsUnmapping);
      }
    }
  }
  if (!scene_.executors.empty() && chance.one_in(900)) {
    SimProcess& process = (*chance.pick(scene_.executors))->process();
    if (process.runs()) scene_.coverage.add(Fault::kExecutorKilled);
    process.kill();
  }
  if (scene_.keeper.lives()) {
    if (chance.one_in(2500)) {
      scene_.coverage.add(Fault::kKeeperKilled);
      scene_.log("the keeper is killed");
      scene_.keeper.kill();
      if (larderd_ && chance.one_in(4)) kill_larderd();
    }
  } else if (chance.one_in(6)) {
    scene_.keeper.start();
  }
  if (larderd_ && chance.one_in(2000)) try_second_larderd();
}

void World::kill_larderd() {
  scene_.coverage.add(Fault::kLarderdKilled);
  scene_.log("larderd is killed");
  larderd_->is_killed();
  std::shared_ptr<SimProcess> process = larderd_->shared_process();
  larderd_.reset();
  if (scene_.chance.one_in(2)) {
    process->exit();
  } else {
    old_larderds_.push_back(std::move(process));
  }
}

void World::try_second_larderd() {
  if (!larderd_->serving() || !larderd_->owns_keeper()) return;
  Larderd second(scene_);
  SIM_CHECK(second.start() == Larderd::Started::kBusy, "two larderds own one keeper");
  scene_.coverage.add(Fault::kSecondLarderd);
}

// ------------------------------------------------------------------------------------------ actors

void World::run_larderd(int times) {
  try {
    for (int i = 0; i < times && larderd_->act(); ++i) {
    }
  } catch (const LarderdKilled&) {
    kill_larderd();
  }
}

void World::start_larderd() {
  larderd_ = std::make_unique<Larderd>(scene_);
  try {
    if (larderd_->start() != Larderd::Started::kServing) larderd_.reset();
  } catch (const LarderdKilled&) {
    kill_larderd();
  }
}

void World::run_others() {
  for (size_t i = 0; i < scene_.executors.size(); ++i)
    if (scene_.chance.one_in(2)) scene_.executors[i]->act();
  if (!old_larderds_.empty() && scene_.chance.one_in(4)) {
    old_larderds_.back()->exit();
    old_larderds_.pop_back();
  }
  if (scene_.keeper.has_messages() && scene_.chance.one_in(6)) scene_.keeper.read_message();
}

// ------------------------------------------------------------------------------------------ the
// end

bool World::is_drained() {
  return scene_.clients.empty() && larderd_ && larderd_->serving() &&
         !scene_.keeper.has_messages() && larderd_->machine().session_stats().empty() &&
         larderd_->machine().unfenced_sessions().empty() && larderd_->owns_keeper() &&
         larderd_->is_idle();
}

void World::drain() {
  draining_ = true;
  scene_.faults = false;
  scene_.crash.enable(false);
  if (!scene_.keeper.lives()) scene_.keeper.start();
  for (const auto& client : scene_.clients) client->leave();
  constexpr int kMostSteps = 200'000;
  for (int i = 0; i < kMostSteps && !is_drained(); ++i) step();
  SIM_CHECK(is_drained(), "the world does not come to rest: clients", scene_.clients.size());
  larderd_->destroy_pools();
  check_drained();
}

}  // namespace larder::sim
