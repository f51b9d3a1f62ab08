// An engine process for tests: gpu_engine SOCKET MODE. It opens the pool "shared", allocates a
// block and says "ready" with its id; then, by MODE:
//   hold    waits for a signal
//   write   writes into its block on the GPU until it is killed
//   fork    the same, after a child without exec was forked, which lives on (its pid is said)
//   fault   makes an illegal access on a line of input, says what CUDA says of it, and exits with 3
//           if the context is dead, as it should be
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <unistd.h>

#include "tests/gpu/byte_pool.h"
#include "tests/gpu/gpu_kernels.h"

namespace {

using namespace larder;

[[noreturn]] void stop(const std::string& what) {
  std::printf("refused %s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(2);
}

template <typename Value>
Value get(Result<Value> result) {
  if (!result) stop(result.status().to_string());
  return std::move(*result);
}

int run(const std::string& socket, const std::string& mode) {
  pid_t child = 0;
  Client client = get(Client::connect({.socket_path = socket, .name = "gpu_engine"}));
  Pool pool = get(client.open_pool(test::byte_pool("shared", 64, Execution::kInProcess)));
  const BlockHandle block = get(pool.allocate(1))[0];
  cudaStream_t stream = nullptr;
  if (cudaStreamCreate(&stream) != cudaSuccess) stop("cudaStreamCreate");
  if (mode == "fork") {
    child = ::fork();
    if (child == 0)
      while (true) ::pause();
  }
  if (mode == "write" || mode == "fork") {
    uint32_t* never = nullptr;
    if (cudaMalloc(reinterpret_cast<void**>(&never), sizeof *never) != cudaSuccess)
      stop("cudaMalloc");
    cudaMemset(never, 0, sizeof *never);
    auto* words =
        reinterpret_cast<uint64_t*>(get(pool.data()) + block.id * pool.block_stride_bytes());
    test::write_until(stream, words, never);
    if (cudaGetLastError() != cudaSuccess) stop("launch");
  }
  std::printf("ready %d %d\n", block.id, child);
  std::fflush(stdout);
  if (mode != "fault")
    while (true) ::pause();
  std::string line;
  std::getline(std::cin, line);
  test::fault(stream);
  const cudaError_t error = cudaStreamSynchronize(stream);
  std::printf("fault %s\n", cudaGetErrorName(error));
  std::fflush(stdout);
  return cudaStreamSynchronize(stream) == cudaSuccess ? 4 : 3;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 1;
  const int status = run(argv[1], argv[2]);
  std::_Exit(status);  // a dead context has nothing to clean up
}
