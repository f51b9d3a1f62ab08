// What an earlier larderd's child may still hold. Files that are opened close-on-exec are a new
// child's too until it has called exec: of a larderd that is killed while it starts an executor,
// locks and addresses stay taken for some milliseconds after its end.
#pragma once

#include <chrono>
#include <thread>

namespace larder::daemon {

// Asks `is_taken` until it says no, for 2 s at most. Blocks: for use before the loop runs.
template <typename IsTaken>
void await_heirs(const IsTaken& is_taken) {
  constexpr auto kDeadline = std::chrono::seconds(2);
  constexpr auto kPause = std::chrono::milliseconds(5);
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (is_taken() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(kPause);
}

}  // namespace larder::daemon
