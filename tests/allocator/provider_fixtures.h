// The kinds of memory that every provider's tests run on: how to get the provider, and how bytes
// get in and out, which for memory of a GPU the CPU cannot do itself. No doctest: a child process
// of the tests uses them too. What goes wrong is thrown.
#pragma once

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include "allocator/cuda_vmm.h"
#include "allocator/host_memory.h"
#include "tests/support/fake_cuda/fake_cuda.h"

namespace larder::test {

// Memory that the CPU reads and writes itself.
struct CpuAccess {
  static constexpr bool kCpuReads = true;
  static void write(std::byte* address, const std::vector<std::byte>& bytes) {
    std::memcpy(address, bytes.data(), bytes.size());
  }
  static std::vector<std::byte> read(const std::byte* address, size_t size) {
    return {address, address + size};
  }
};

// A folder for the fake driver's books, in the environment of this process and its children.
class FakeCudaFolder {
 public:
  FakeCudaFolder() {
    char path[] = "/tmp/larder-fake-cuda-XXXXXX";
    if (::mkdtemp(path) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = path;
    ::setenv("FAKE_CUDA_DIR", path, 1);
  }
  ~FakeCudaFolder() {
    ::unsetenv("FAKE_CUDA_DIR");
    ::unlink((path_ + "/books").c_str());
    ::rmdir(path_.c_str());
  }
  FakeCudaFolder(const FakeCudaFolder&) = delete;
  FakeCudaFolder& operator=(const FakeCudaFolder&) = delete;

 private:
  std::string path_;
};

struct HostMemory : CpuAccess {
  static constexpr const char* kKind = "host";
  static constexpr bool kHasLimit = false;    // memory is taken when it is touched
  std::string why_not() const { return ""; }  // empty where it can be used
  const MemoryProvider& provider() const { return provider_; }
  HostMemoryProvider provider_;
};

// The first device of the driver in `library`.
inline std::unique_ptr<CudaVmmProvider> open_first_device(const std::string& library,
                                                          CudaVmmOptions options = {}) {
  Result<std::shared_ptr<const CudaDriver>> driver = CudaDriver::load(library);
  if (!driver) throw std::runtime_error(driver.status().to_string());
  auto provider = CudaVmmProvider::open(*driver, (*driver)->devices().front().uuid, options);
  if (!provider) throw std::runtime_error(provider.status().to_string());
  return std::move(*provider);
}

class FakeGpuMemory : public CpuAccess {
 public:
  static constexpr const char* kKind = "fake";
  static constexpr bool kHasLimit = true;
  std::string why_not() const { return ""; }  // empty where it can be used
  const MemoryProvider& provider() const { return *provider_; }

 private:
  // A child takes part in its parent's books.
  std::unique_ptr<FakeCudaFolder> folder_ =
      std::getenv("FAKE_CUDA_DIR") == nullptr ? std::make_unique<FakeCudaFolder>() : nullptr;
  std::unique_ptr<CudaVmmProvider> provider_ = open_first_device(LARDER_FAKE_CUDA);
};

// The GPU of this machine. Its bytes go through a context, which only this fixture makes.
class RealGpuMemory {
 public:
  static constexpr const char* kKind = "real";
  static constexpr bool kHasLimit = true;
  static constexpr bool kCpuReads = false;

  RealGpuMemory() {
    Result<std::shared_ptr<const CudaDriver>> driver = CudaDriver::load();
    if (!driver) {
      reason_ = driver.status().message();
      return;
    }
    provider_ = open_first_device(CudaDriver::kLibrary);
    library_ = ::dlopen(CudaDriver::kLibrary, RTLD_NOW | RTLD_NOLOAD);
    expect_success("cuDevicePrimaryCtxRetain", entry<int(void**, int)>("cuDevicePrimaryCtxRetain")(
                                                   &context_, provider_->device().ordinal));
  }

  const std::string& why_not() const { return reason_; }
  const MemoryProvider& provider() const { return *provider_; }
  void write(std::byte* address, const std::vector<std::byte>& bytes) const {
    enter();
    expect_success("cuMemcpyHtoD",
                   entry<int(cuda::Address, const void*, size_t)>("cuMemcpyHtoD_v2")(
                       reinterpret_cast<cuda::Address>(address), bytes.data(), bytes.size()));
    // From pageable memory it returns before the bytes are there, and the place may be unmapped
    // next.
    expect_success("cuCtxSynchronize", entry<int()>("cuCtxSynchronize")());
  }
  std::vector<std::byte> read(const std::byte* address, size_t size) const {
    enter();
    std::vector<std::byte> bytes(size);
    expect_success("cuMemcpyDtoH",
                   entry<int(void*, cuda::Address, size_t)>("cuMemcpyDtoH_v2")(
                       bytes.data(), reinterpret_cast<cuda::Address>(address), size));
    return bytes;
  }

 private:
  template <typename Function>
  Function* entry(const char* symbol) const {
    return reinterpret_cast<Function*>(::dlsym(library_, symbol));
  }
  // A context is current in one thread.
  void enter() const {
    expect_success("cuCtxSetCurrent", entry<int(void*)>("cuCtxSetCurrent")(context_));
  }
  static void expect_success(const char* call, int result) {
    if (result != 0) throw std::runtime_error(std::string(call) + ": " + std::to_string(result));
  }

  std::string reason_;
  std::unique_ptr<CudaVmmProvider> provider_;
  void* library_ = nullptr;
  void* context_ = nullptr;  // kept until the process ends: retaining it again is cheap
};

}  // namespace larder::test
