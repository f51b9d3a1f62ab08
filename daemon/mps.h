// larderd must not become a client of an MPS server: one fault of any other client would end it.
// The driver looks for the server in $CUDA_MPS_PIPE_DIRECTORY when it is initialised, so larderd
// looks elsewhere, and its executors, which are clients if an engine is, where it was.
#pragma once

#include <cstdlib>

namespace larder::daemon {

inline constexpr const char* kMpsVariable = "CUDA_MPS_PIPE_DIRECTORY";
inline constexpr const char* kKeptMpsVariable = "LARDER_KEPT_MPS_PIPE_DIRECTORY";

// larderd, before threads are there.
inline void stay_out_of_mps() {
  const char* folder = std::getenv(kMpsVariable);
  ::setenv(kKeptMpsVariable, folder == nullptr ? "" : folder, 1);
  ::setenv(kMpsVariable, "/dev/null/larderd-is-no-client", 1);
}

// An executor that larderd has started, likewise.
inline void join_mps_again() {
  const char* kept = std::getenv(kKeptMpsVariable);
  if (kept == nullptr) return;
  if (*kept == '\0')
    ::unsetenv(kMpsVariable);
  else
    ::setenv(kMpsVariable, kept, 1);
  ::unsetenv(kKeptMpsVariable);
}

}  // namespace larder::daemon
