// longjmp between stacks is what is wanted here, and what fortified builds take for a mistake.
#undef _FORTIFY_SOURCE

#include "tests/support/cuda_threads.h"

#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace larder::test {
namespace {

constexpr int kWarpLanes = 32;
constexpr int kMaxThreads = 1024;
// Not a power of two, so that what threads of a warp have on top of theirs fits a cache.
constexpr size_t kStackBytes = (64 << 10) + 832;

// A stack and where it goes on: of a thread of a CTA, or the program's own.
struct Fiber {
  std::vector<std::byte> stack;  // empty: the program's
  ucontext_t begin;
  jmp_buf goes_on;
  bool has_begun = false;
  bool is_done = true;  // with the body
  // For AddressSanitizer: what it keeps of a stack that is left, and which stack that was.
  void* kept = nullptr;
  const void* bottom = nullptr;
  size_t size_bytes = 0;
};

struct Barrier {
  int arrived = 0;
  uint32_t generation = 0;
};

// Lanes write by turns to one half and the other, so that one meeting an exchange is enough.
struct Warp {
  Barrier barrier;
  std::array<std::array<uint64_t, kWarpLanes>, 2> values;
};

struct Cta {
  Fiber program;
  std::array<Fiber, kMaxThreads> threads;  // made when first wanted, and kept
  std::array<Warp, kMaxThreads / kWarpLanes> warps;
  Barrier barrier;
  const std::function<void()>* body = nullptr;  // nullptr: no CTA runs
  int num_threads = 0;
  int num_running = 0;
  int num_waiting = 0;
  int current = 0;
};
Cta cta;

void leave([[maybe_unused]] Fiber& from, [[maybe_unused]] const Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&from.kept, to.bottom, to.size_bytes);
#endif
}
// Where the program's own stack lies is known once it has been left.
void arrive([[maybe_unused]] void* kept, [[maybe_unused]] Fiber* from) {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  size_t size_bytes = 0;
  __sanitizer_finish_switch_fiber(kept, &bottom, &size_bytes);
  if (from != nullptr) {
    from->bottom = bottom;
    from->size_bytes = size_bytes;
  }
#endif
}

// Ten times as fast as swapcontext, which asks the kernel for the signal mask.
void switch_to(Fiber& from, Fiber& to) {
  leave(from, to);
  from.has_begun = true;
  if (_setjmp(from.goes_on) == 0) {
    if (to.has_begun) _longjmp(to.goes_on, 1);
    to.has_begun = true;
    setcontext(&to.begin);
  }
  arrive(from.kept, nullptr);
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "cuda_threads: %s\n", what);
  std::abort();
}

// To the next thread that has not ended, from `next` on.
void go_on_with(int next) {
  Fiber& before = cta.threads[static_cast<size_t>(cta.current)];
  while (cta.threads[static_cast<size_t>(next)].is_done)
    next = next + 1 == cta.num_threads ? 0 : next + 1;
  cta.current = next;
  threadIdx.x = static_cast<unsigned>(next);
  Fiber& after = cta.threads[static_cast<size_t>(next)];
  if (&before != &after) switch_to(before, after);
}
int next_of_cta() { return cta.current + 1 == cta.num_threads ? 0 : cta.current + 1; }
int next_of_warp() {
  return cta.current % kWarpLanes + 1 == kWarpLanes ? cta.current + 1 - kWarpLanes
                                                    : cta.current + 1;
}

void check_progress() {
  if (cta.num_running > 0 && cta.num_waiting == cta.num_running)
    fail("all threads wait at barriers that others never come to");
}

// A warp goes on for as long as it does not wait for others.
void meet(Barrier& barrier, int members) {
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.generation;
    cta.num_waiting -= members - 1;
    return;
  }
  ++cta.num_waiting;
  check_progress();
  const uint32_t generation = barrier.generation;
  go_on_with(members == kWarpLanes ? next_of_warp() : next_of_cta());
  while (barrier.generation == generation) go_on_with(next_of_cta());
}

Warp& warp_of_current() { return cta.warps[static_cast<size_t>(cta.current / kWarpLanes)]; }

// A thread of every CTA that runs, one after the other.
void run_thread() {
  arrive(nullptr, cta.program.bottom == nullptr ? &cta.program : nullptr);
  while (true) {
    (*cta.body)();
    Fiber& self = cta.threads[static_cast<size_t>(cta.current)];
    self.is_done = true;
    --cta.num_running;
    check_progress();
    if (cta.num_running == 0)
      switch_to(self, cta.program);
    else
      go_on_with(next_of_cta());
  }
}

void make_stack(Fiber& thread) {
  thread.stack.resize(kStackBytes);
  thread.bottom = thread.stack.data();
  thread.size_bytes = kStackBytes;
  if (getcontext(&thread.begin) != 0) fail("getcontext fails");
  thread.begin.uc_stack.ss_sp = thread.stack.data();
  thread.begin.uc_stack.ss_size = kStackBytes;
  thread.begin.uc_link = nullptr;
  makecontext(&thread.begin, run_thread, 0);
}

}  // namespace

void be_thread(const CudaPlace& place) {
  gridDim = {static_cast<unsigned>(place.grid), 1, 1};
  blockDim = {static_cast<unsigned>(place.threads), 1, 1};
  blockIdx = {static_cast<unsigned>(place.cta), 0, 0};
  threadIdx = {static_cast<unsigned>(place.thread), 0, 0};
  cta.current = place.thread;
}

void run_cta(const CudaPlace& place, const std::function<void()>& body) {
  if (place.threads < kWarpLanes || place.threads > kMaxThreads || place.threads % kWarpLanes != 0)
    fail("a CTA has 1 to 32 whole warps");
  be_thread({place.grid, place.cta, place.threads, 0});
  cta.body = &body;
  cta.num_threads = cta.num_running = place.threads;
  cta.num_waiting = 0;
  for (int i = 0; i < place.threads; ++i) {
    Fiber& thread = cta.threads[static_cast<size_t>(i)];
    if (thread.stack.empty()) make_stack(thread);
    thread.is_done = false;
  }
  switch_to(cta.program, cta.threads[0]);
  cta.body = nullptr;
}

const uint64_t* exchange_in_warp(uint64_t value) {
  Warp& warp = warp_of_current();
  auto& values = warp.values[warp.barrier.generation % 2];
  if (cta.body == nullptr) {
    values.fill(value);
  } else {
    values[static_cast<size_t>(lane_of_warp())] = value;
    meet_in_warp();
  }
  return values.data();
}

void meet_in_warp() {
  if (cta.body != nullptr) meet(warp_of_current().barrier, kWarpLanes);
}
void meet_in_cta() {
  if (cta.body != nullptr) meet(cta.barrier, cta.num_threads);
}
int lane_of_warp() { return cta.current % kWarpLanes; }

}  // namespace larder::test
