#include "allocator/cuda_driver.h"

#include <doctest/doctest.h>

#include "tests/allocator/fake_driver.h"
#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using test::check_status;
using test::FakeDriver;
using enum ErrorCode;

TEST_CASE("where there is no driver, the reason is told") {
  check_status(CudaDriver::load("/nonexistent/libcuda.so.1").status(), kUnavailable,
               {"/nonexistent/libcuda.so.1", "No such file"});
  check_status(CudaDriver::load("libm.so.6").status(), kUnavailable,
               {"libm.so.6", "has no cuMem", "driver 470"});
}

TEST_CASE("a driver that does not start is unavailable, with the call and the driver's words") {
  {
    const FakeDriver fake;
    fake.fail_at(1, cuda::kNotPermitted);
    check_status(fake.load().status(), kUnavailable,
                 {"cuInit", "CUDA_ERROR_NOT_PERMITTED", "800", LARDER_FAKE_CUDA});
    fake.fail_at(1, 12345);
    check_status(fake.load().status(), kUnavailable, {"cuInit", "CUDA error 12345"});
  }
  const FakeDriver none{{"DEVICES", "0"}};
  check_status(none.load().status(), kUnavailable, {"cuInit", "CUDA_ERROR_NO_DEVICE", "100"});
}

TEST_CASE("each call that asks for devices may fail, and is named") {
  const FakeDriver fake;
  const char* const calls[] = {"cuInit",
                               "cuDriverGetVersion",
                               "cuDeviceGetCount",
                               "cuDeviceGet",
                               "cuDeviceGetUuid_v2",
                               "cuDeviceGetName",
                               "cuDeviceTotalMem_v2"};
  int k = 0;
  for (const char* const call : calls) {
    fake.fail_at(++k, cuda::kInvalidValue);
    check_status(fake.load().status(), kUnavailable, {call, "CUDA_ERROR_INVALID_VALUE"});
  }
  fake.fail_at(k + 1);
  CHECK(fake.load().ok());
}

TEST_CASE("devices have UUIDs, names and sizes") {
  const FakeDriver fake{{"DEVICES", "2"},
                        {"UUIDS", "GPU-00112233-4455-6677-8899-aabbccddeeff"},
                        {"MEMORY_MIB", "96"}};
  const auto driver = fake.load();
  REQUIRE(driver.ok());
  CHECK((*driver)->version() == 13000);
  const auto& devices = (*driver)->devices();
  REQUIRE(devices.size() == 2);
  CHECK(devices[0].ordinal == 0);
  CHECK(devices[0].uuid == "GPU-00112233-4455-6677-8899-aabbccddeeff");
  CHECK(devices[0].name == "Fake GPU 0");
  CHECK(devices[0].total_bytes == 96 << 20);
  CHECK(devices[1].ordinal == 1);
  CHECK(devices[1].uuid == "GPU-fa4e0000-cda0-4000-8000-000000000001");
}

TEST_CASE("a device is found by its UUID, with or without a prefix, in either case") {
  const FakeDriver fake{{"DEVICES", "2"},
                        {"UUIDS",
                         "GPU-00112233-4455-6677-8899-aabbccddeeff,"
                         "MIG-ff112233-4455-6677-8899-aabbccddeeff"}};
  const auto loaded = fake.load();
  REQUIRE(loaded.ok());
  const CudaDriver& driver = **loaded;
  for (const char* uuid :
       {"GPU-ff112233-4455-6677-8899-aabbccddeeff", "MIG-ff112233-4455-6677-8899-aabbccddeeff",
        "ff112233-4455-6677-8899-aabbccddeeff", "mig-FF112233-4455-6677-8899-AABBCCDDEEFF"}) {
    CAPTURE(uuid);
    const Result<CudaDevice> device = driver.find_device(uuid);
    REQUIRE(device.ok());
    CHECK(device->ordinal == 1);
  }
  check_status(driver.find_device("GPU-01112233-4455-6677-8899-aabbccddeeff").status(), kNotFound,
               {"GPU-01112233-", "GPU-00112233-4455-6677-8899-aabbccddeeff (Fake GPU 0)",
                "GPU-ff112233-4455-6677-8899-aabbccddeeff (Fake GPU 1)"});
  for (const char* text :
       {"", "0", "GPU-", "GPU-00112233", "GPU-GPU-00112233-4455-6677-8899-aabb",
        "00112233445566778899aabbccddeeff0000", "GPU-g0112233-4455-6677-8899-aabbccddeeff",
        "GPU-00112233-4455-6677-8899-aabbccddeeff0"}) {
    CAPTURE(text);
    check_status(driver.find_device(text).status(), kInvalidArgument,
                 {"\"" + std::string(text) + "\"", "GPU-01234567"});
  }
}

}  // namespace
}  // namespace larder
