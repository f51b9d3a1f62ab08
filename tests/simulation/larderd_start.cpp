// How larderd begins: with a new cache, or where its predecessor was killed; and how it gives a new
// keeper everything again.
#include <algorithm>
#include <cstring>

#include "tests/simulation/larderd.h"
#include "tests/simulation/violation.h"
#include "tests/simulation/workload.h"

namespace larder::sim {
namespace {

constexpr int64_t kGraceUs = 30'000'000;

KeeperHost::Entry* find(std::vector<KeeperHost::Entry>& entries, uint64_t key) {
  const auto found = std::ranges::find(entries, key, &KeeperHost::Entry::key);
  return found == entries.end() || !found->fd.valid() ? nullptr : &*found;
}

}  // namespace

Larderd::Started Larderd::start() {
  activity_ = kStarting;
  ++scene_.coverage.activities[kStarting];
  scene_.crash.consider();
  link_ = scene_.keeper.connect(process_);
  if (!link_) return Started::kNoKeeper;
  if (Status status = scene_.keeper.hello(*link_); !status.ok()) return Started::kBusy;
  step();
  auto entries = scene_.keeper.list(*link_);
  SIM_CHECK(entries.ok(), entries.status().to_string());
  step();
  if (KeeperHost::Entry* journal = find(*entries, journal_key())) {
    go_on(*entries, *journal);
  } else {
    start_fresh(*entries);
  }
  apply(configuration());
  activity_ = kStarting;
  step();
  for (auto& [id, session] : sessions_)
    if (is_signalled(evidence_.at(id).get())) to_end_.insert(id);
  serving_ = true;
  return Started::kServing;
}

void Larderd::close_entry(uint64_t key) {
  const Status status = scene_.keeper.drop(*link_, key);
  SIM_CHECK(status.ok(), status.to_string());
  step();
}

// Without a journal nothing that the keeper has is of use. Sessions that come back are told so.
void Larderd::start_fresh(std::vector<KeeperHost::Entry>& entries) {
  if (scene_.cache != 0) scene_.coverage.add(Fault::kBothKilled);
  scene_.log("larderd starts with a new cache");
  for (const KeeperHost::Entry& entry : entries) close_entry(entry.key);
  cache_ = scene_.cache + 1;
  scene_.cache = cache_;
  scene_.books.new_cache();
  checkpoint(machine_.snapshot());
}

void Larderd::go_on(std::vector<KeeperHost::Entry>& entries, KeeperHost::Entry& journal) {
  std::memcpy(&cache_, journal.metadata.data(), sizeof cache_);
  SIM_CHECK(cache_ == scene_.cache, "another cache", cache_, scene_.cache);
  journal_memory_ = &scene_.memories.of(journal.fd.get());
  journal_fd_ = std::move(journal.fd);
  const auto contents = read_journal(journal_memory_->bytes);
  SIM_CHECK(contents.ok(), contents.status().to_string());
  if (scene_.faults && scene_.chance.one_in(4)) damage_a_copy(*journal_memory_, *contents);
  const Status recovered = machine_.recover(*contents);
  SIM_CHECK(recovered.ok(), recovered.to_string());
  const auto expected = scene_.expected.find(journal_memory_->number);
  SIM_CHECK(expected != scene_.expected.end(), "a journal of nobody", journal_memory_->number);
  SIM_CHECK(std::ranges::equal(machine_.snapshot(), expected->second),
            "the journal leads to another state than that of the larderd that was killed");
  scene_.expected.clear();
  journal_ = Journal::resume(journal_memory_->bytes, *contents);
  replace_replica(machine_.snapshot());
  machine().check_consistency();
  step();

  adopt_segments(entries);
  adopt_sessions(entries);
  if (KeeperHost::Entry* executor = find(entries, executor_key()))
    old_executor_ = std::move(executor->fd);
  scene_.books.recovered(machine());
  for (const KeeperHost::Entry& entry : entries)  // what the journal does not name
    if (entry.fd.valid() && entry.key != journal_key()) close_entry(entry.key);
  apply(Recovered{});
  ++scene_.coverage.recoveries;
  scene_.log("larderd goes on");
}

void Larderd::adopt_segments(std::vector<KeeperHost::Entry>& entries) {
  for (const SegmentRecord& record : machine().segments()) {
    KeeperHost::Entry* entry = find(entries, segment_key(record.segment));
    SIM_CHECK(entry != nullptr, "the keeper has no segment", value(record.segment));
    Memory* memory = &scene_.memories.of(entry->fd.get());
    SIM_CHECK(memory == scene_.books.segment(record.segment).memory, "another memory",
              value(record.segment));
    segments_.emplace(record.segment, Held{std::move(entry->fd), memory});
  }
}

void Larderd::adopt_sessions(std::vector<KeeperHost::Entry>& entries) {
  const auto adopt_evidence = [&](SessionId id) {
    KeeperHost::Entry* entry = find(entries, process_key(id));
    SIM_CHECK(entry != nullptr, "the keeper has no evidence of session", value(id));
    evidence_.emplace(id, std::move(entry->fd));
  };
  for (const auto& [id, tenant, role, attachment] : machine().session_attachments()) {
    Session session;
    SIM_CHECK(attachment.size() == sizeof session.pid + 1, attachment.size());
    std::memcpy(&session.pid, attachment.data(), sizeof session.pid);
    session.kind = static_cast<ClientKind>(attachment.back());
    session.deadline_us = scene_.now_us + kGraceUs;
    sessions_.emplace(id, std::move(session));
    adopt_evidence(id);
  }
  for (const UnfencedSession& session : machine().unfenced_sessions())
    adopt_evidence(session.session);
}

// One bit of a copy is turned over: it is refused, or (in padding) says the same.
void Larderd::damage_a_copy(const Memory& journal, const JournalContents& contents) {
  scene_.coverage.add(Fault::kDamagedJournal);
  uint64_t committed = 0;
  std::memcpy(&committed, journal.bytes.data() + offsetof(JournalHeader, committed_bytes),
              sizeof committed);
  std::vector<std::byte> copy = journal.bytes;
  copy[static_cast<size_t>(scene_.chance.below(committed))] ^= std::byte{1}
                                                               << scene_.chance.below(8);
  const auto read = read_journal(copy);
  if (!read) return;
  bool same = std::ranges::equal(read->snapshot, contents.snapshot) &&
              read->records.size() == contents.records.size();
  for (size_t i = 0; same && i < contents.records.size(); ++i)
    same = std::ranges::equal(read->records[i], contents.records[i]);
  SIM_CHECK(same, "a damaged journal was accepted");
}

// Segments first and the journal last: whenever this process is killed meanwhile, the keeper has
// either no journal or everything that the journal names.
bool Larderd::deposit_again() {
  activity_ = kRedepositing;
  auto link = scene_.keeper.connect(process_);
  if (!link) return false;
  link_ = std::move(link);
  ++scene_.coverage.activities[kRedepositing];
  const auto deposit = [&](uint64_t key, int fd, const Metadata& metadata) {
    step();
    const Status status = scene_.keeper.put(*link_, key, fd, metadata);
    SIM_CHECK(status.ok(), status.to_string());
  };
  const Status status = scene_.keeper.hello(*link_);
  SIM_CHECK(status.ok(), status.to_string());
  for (const auto& [id, held] : segments_) deposit(segment_key(id), held.fd.get(), {});
  for (const auto& [id, fd] : evidence_) deposit(process_key(id), fd.get(), {});
  if (executor_ != nullptr) deposit(executor_key(), executor_->process().pidfd(), {});
  if (old_executor_.valid()) deposit(executor_key(), old_executor_.get(), {});
  deposit(journal_key(), journal_fd_.get(), journal_metadata());
  step();
  scene_.log("the new keeper has everything");
  return true;
}

}  // namespace larder::sim
