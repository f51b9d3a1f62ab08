// Both ends of the rings at the same time, each side in a thread of its own.
#include <atomic>
#include <chrono>
#include <poll.h>
#include <sys/eventfd.h>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>

#include "larder/own_fd.h"
#include "protocol/arena.h"
#include "tests/protocol/arena_memory.h"
#include "tests/support/random.h"

namespace larder::protocol {
namespace {

using namespace std::chrono_literals;
using test::ArenaMemory;

constexpr uint64_t kCalls = 20'000;
constexpr uint32_t kNearWrap = 0u - 1000;

std::chrono::steady_clock::time_point test_deadline() {
  return std::chrono::steady_clock::now() + 60s;
}

// Serves until `kCalls` are done. Sleeps as the executor does: announce, look again, wait for the
// eventfd. False when a wake-up was lost or a record was torn.
bool serve(Arena arena, int wake_fd) {
  ArenaServer server(arena);
  for (uint64_t num_done = 0; num_done < kCalls;) {
    const auto head = server.peek();
    if (!head.ok()) return false;
    if (head->has_value()) {
      const Submission& record = **head;
      if (record.block_table_stride != ~record.request) return false;
      while (!server.wait_reached(record) || !server.can_complete()) std::this_thread::yield();
      server.complete(record, {});
      ++num_done;
      continue;
    }
    server.set_sleeping(true);
    if (server.num_pending() == 0) {
      pollfd entry{wake_fd, POLLIN, 0};
      if (::poll(&entry, 1, 20'000) != 1) return false;
      uint64_t count = 0;
      if (::read(wake_fd, &count, sizeof count) != sizeof count) return false;
    }
    server.set_sleeping(false);
  }
  return true;
}

// Every 16th call waits for a word that another thread raises later.
bool submit(Arena arena, int wake_fd, std::atomic<uint64_t>& num_submitted) {
  SubmissionWriter writer(arena);
  auto engine = test::random_engine(41);
  for (uint64_t request = 0; request < kCalls; ++request) {
    Submission record;
    record.request = request;
    record.block_table_stride = ~request;
    record.signal_word = 1;
    record.signal_value = request + 1;
    if (request % 16 == 0) {
      record.wait_word = 0;
      record.wait_value = request;
    }
    while (!writer.push(record)) std::this_thread::yield();
    num_submitted.store(request + 1, std::memory_order_relaxed);
    const uint64_t one = 1;
    if (writer.wake_needed() && ::write(wake_fd, &one, sizeof one) != sizeof one) return false;
    // Now and then the executor falls asleep.
    if (engine() % 256 == 0) std::this_thread::yield();
    if (engine() % 2048 == 0)
      while (arena.word(1).load(std::memory_order_acquire) != request + 1)
        std::this_thread::yield();
  }
  return true;
}

bool read_completions(Arena arena) {
  CompletionReader reader(arena);
  for (uint64_t request = 0; request < kCalls;) {
    if (!reader.wait(test_deadline())) return false;
    while (const auto completion = reader.pop()) {
      // The word was raised before the completion could be seen.
      if (completion->request != request || completion->code != 0 ||
          arena.word(1).load(std::memory_order_acquire) < request + 1)
        return false;
      ++request;
    }
  }
  return !reader.pop().has_value();
}

TEST_CASE("calls from one thread are served in another and read in a third, in order") {
  const ArenaMemory memory;
  memory.set_indices(kNearWrap, kNearWrap + 77);
  const OwnFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::atomic<uint64_t> num_submitted = 0;
  bool served = false;
  bool submitted = false;
  bool read = false;
  std::thread server([&] { served = serve(memory.arena(), wake.get()); });
  std::thread client([&] { submitted = submit(memory.arena(), wake.get(), num_submitted); });
  std::thread reader([&] { read = read_completions(memory.arena()); });
  // The engine's stream: raises the word that calls wait for, up to what is submitted.
  std::thread stream([&] {
    for (uint64_t value = 0; value < kCalls;) {
      value = num_submitted.load(std::memory_order_relaxed);
      memory.arena().word(0).store(value, std::memory_order_release);
      std::this_thread::yield();
    }
  });
  for (std::thread* thread : {&server, &client, &reader, &stream}) thread->join();
  CHECK(served);
  CHECK(submitted);
  CHECK(read);
}

TEST_CASE("a client asleep in wait() is woken by the completion") {
  const ArenaMemory memory;
  SubmissionWriter writer(memory.arena());
  CompletionReader reader(memory.arena());
  ArenaServer server(memory.arena());
  for (uint64_t round = 0; round < 20; ++round) {
    Submission record;
    record.request = round;
    REQUIRE(writer.push(record));
    std::atomic<bool> waiting = false;
    std::thread executor([&] {
      while (!waiting) std::this_thread::yield();
      // Longer than wait() spins, so that most rounds find it asleep.
      const auto until = std::chrono::steady_clock::now() + 2ms;
      while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
      server.complete(record, {});
    });
    waiting = true;
    CHECK(reader.wait(test_deadline()));
    CHECK(reader.pop()->request == round);
    executor.join();
  }
}

TEST_CASE("waiting ends at the deadline while another thread writes the word it sleeps on") {
  const ArenaMemory memory;
  CompletionReader reader(memory.arena());
  std::atomic<bool> stop = false;
  // Indices that make no sense, over and over.
  std::thread hostile([&] {
    for (uint32_t i = 0; !stop; ++i)
      memory.arena().header().complete_tail.store(0x40000000u + i % 1000);
  });
  const auto start = std::chrono::steady_clock::now();
  CHECK_FALSE(reader.wait(start + 20ms));
  CHECK(std::chrono::steady_clock::now() - start < 10s);
  stop = true;
  hostile.join();
}

}  // namespace
}  // namespace larder::protocol
