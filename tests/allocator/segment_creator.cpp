// A process that creates a segment, fills it, sends its fd and waits to be killed:
// segment_creator KIND SIZE_BYTES SOCKET.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "tests/allocator/fd_messages.h"
#include "tests/allocator/provider_fixtures.h"

namespace larder::test {
namespace {

template <typename Memory>
int create(int64_t size_bytes, int socket) {
  const Memory memory;
  if (!memory.why_not().empty()) return 1;
  const Segment segment = memory.provider().create("larder-test", size_bytes);
  const auto range = memory.provider().reserve(size_bytes);
  range->map_at(0, segment.fd.get(), size_bytes);
  memory.write(range->base(),
               std::vector<std::byte>(static_cast<size_t>(size_bytes), std::byte{0xA5}));
  if (!send_fd(socket, segment.fd.get())) return 1;
  while (true) ::pause();
}

}  // namespace
}  // namespace larder::test

int main(int argc, char** argv) {
  using namespace larder::test;
  if (argc != 4) return std::fputs("usage: segment_creator KIND SIZE_BYTES SOCKET\n", stderr), 2;
  const std::string_view kind = argv[1];
  const int64_t size_bytes = std::strtoll(argv[2], nullptr, 10);
  const int socket = static_cast<int>(std::strtol(argv[3], nullptr, 10));
  try {
    if (kind == HostMemory::kKind) return create<HostMemory>(size_bytes, socket);
    if (kind == FakeGpuMemory::kKind) return create<FakeGpuMemory>(size_bytes, socket);
    if (kind == RealGpuMemory::kKind) return create<RealGpuMemory>(size_bytes, socket);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "segment_creator: %s\n", error.what());
    return 1;
  }
  return 2;
}
