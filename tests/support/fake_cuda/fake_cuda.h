// A CUDA driver without a GPU: a shared library, libcuda.so.1, with the entry points of
// allocator/cuda_abi.h and the rules of virtual memory management. Device memory is memfds, so
// bytes are shared between processes as on a GPU, and the CPU can look at them.
//
// A process takes it through CudaDriver::load(path), or whole programs through LD_LIBRARY_PATH.
// cuInit reads the environment, each time that it is called:
//   FAKE_CUDA_DIR              a folder for the books that all processes share; must be given
//   FAKE_CUDA_DEVICES          number of devices, default 1; with 0, cuInit says so
//   FAKE_CUDA_UUIDS            their UUIDs, separated by commas; else made up from the ordinal
//   FAKE_CUDA_MEMORY_MIB       memory of each device, default 1024
//   FAKE_CUDA_GRANULARITY_KIB  of sizes, offsets and addresses, default 2048
//   FAKE_CUDA_RECLAIM_MS       how long the memory of a dead process stays taken, default 0
//   FAKE_CUDA_WITHOUT          "vmm" or "fds": an attribute that the devices lack
//   FAKE_CUDA_FAIL_AT          the how many-th call of the process fails, with
//   FAKE_CUDA_FAIL_WITH        this CUresult, default 2 (out of memory)
//
// Enforced, with the driver's codes: nothing works before cuInit, nor in a fork of a process that
// called it; granularity; memory that is taken until all its handles, mappings and fds are gone, in
// all processes; no access before cuMemSetAccess; one mapping a place, unmapped whole; no addresses
// freed while something is mapped there. Not there: contexts, peer access, several locations.
#pragma once

#include <cstdint>

struct FakeCudaBooks {
  // Of this process.
  int64_t handles;
  int64_t mappings;
  int64_t reservations;
  int64_t calls;  // so far, successful or not
  // Of all devices and processes.
  int64_t bytes;
};

// What the library exports beside the driver's entry points; to be found with dlsym.
extern "C" {
// The k-th call from now on fails with `error` and does nothing; 0 takes it back.
void fake_cuda_fail_at(int k, int error);
// It and all after it, as with a GPU that is lost.
void fake_cuda_fail_from(int k, int error);
void fake_cuda_books(FakeCudaBooks* books);
}
