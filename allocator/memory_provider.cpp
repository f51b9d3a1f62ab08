#include "allocator/memory_provider.h"

#include <system_error>

#include "allocator/cuda_error.h"

namespace larder {

bool is_out_of_memory(const std::runtime_error& error) {
  if (const auto* cuda = dynamic_cast<const CudaError*>(&error)) return cuda->is_out_of_memory();
  const auto* system = dynamic_cast<const std::system_error*>(&error);
  return system != nullptr && system->code() == std::errc::not_enough_memory;
}

}  // namespace larder
