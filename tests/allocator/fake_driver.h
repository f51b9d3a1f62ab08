// The fake driver as a test holds it: an environment and books of its own, failures on demand.
#pragma once

#include <cstdlib>
#include <dlfcn.h>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "allocator/cuda_vmm.h"
#include "tests/allocator/provider_fixtures.h"
#include "tests/support/fake_cuda/fake_cuda.h"

namespace larder::test {

class FakeDriver {
 public:
  struct Variable {
    std::string name;  // without "FAKE_CUDA_"
    std::string value;
  };

  FakeDriver() : FakeDriver(std::initializer_list<Variable>{}) {}
  // With this environment until it goes.
  FakeDriver(std::initializer_list<Variable> environment)
      : environment_(environment), library_(::dlopen(LARDER_FAKE_CUDA, RTLD_NOW)) {
    REQUIRE(library_ != nullptr);
    for (const auto& [name, value] : environment_)
      ::setenv(("FAKE_CUDA_" + name).c_str(), value.c_str(), 1);
  }
  ~FakeDriver() {
    fail_at(0);
    for (const auto& [name, value] : environment_) ::unsetenv(("FAKE_CUDA_" + name).c_str());
  }
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  Result<std::shared_ptr<const CudaDriver>> load() const {
    return CudaDriver::load(LARDER_FAKE_CUDA);
  }
  std::unique_ptr<CudaVmmProvider> open(CudaVmmOptions options = {}) const {
    return open_first_device(LARDER_FAKE_CUDA, options);
  }
  // The k-th call from now on; 0 takes it back.
  void fail_at(int k, cuda::Result error = cuda::kOutOfMemory) const {
    entry<void(int, int)>("fake_cuda_fail_at")(k, error);
  }
  // It and all after it.
  void fail_from(int k, cuda::Result error) const {
    entry<void(int, int)>("fake_cuda_fail_from")(k, error);
  }
  FakeCudaBooks books() const {
    FakeCudaBooks books{};
    entry<void(FakeCudaBooks*)>("fake_cuda_books")(&books);
    return books;
  }

 private:
  template <typename Function>
  Function* entry(const char* symbol) const {
    return reinterpret_cast<Function*>(::dlsym(library_, symbol));
  }

  FakeCudaFolder folder_;
  std::vector<Variable> environment_;
  void* library_;
};

// Nothing is left of it: no handle, mapping, reservation or byte more than before.
inline void check_same(const FakeCudaBooks& now, const FakeCudaBooks& before) {
  CHECK(now.handles == before.handles);
  CHECK(now.mappings == before.mappings);
  CHECK(now.reservations == before.reservations);
  CHECK(now.bytes == before.bytes);
}

}  // namespace larder::test
