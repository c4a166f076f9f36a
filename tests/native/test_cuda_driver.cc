// Opening CUDA's driver and devices, and what the fake one keeps to.
#include <cstdlib>
#include <functional>
#include <vector>

#include "check.h"
#include "cuda_driver.h"
#include "fake_cuda.h"
#include "fake_driver.h"

using namespace ffi_transport;
using check::FakeDriver;

namespace {

// Made before any driver was opened, so its end comes after all that opening one made: threads that
// nobody joined call the driver as late.
struct AtTheEnd {
  const CudaDriver* driver = nullptr;
  ~AtTheEnd() {
    if (driver != nullptr && driver->init == nullptr) std::abort();
  }
} g_at_the_end;

bool logged(const std::string& words) {
  return std::string(fake_cuda_log()).find(words) != std::string::npos;
}

}  // namespace

TEST(driver_says_what_is_missing) {
  setenv("JAXDISAGG_LIBCUDA", "/nowhere/libcuda.so", 1);
  CHECK_FAILS(CudaDriver::open().status(), Code::kUnavailable, "/nowhere/libcuda.so");
  CHECK_EQ(CudaDriver::open().status().detail().missing, "libcuda.so.1");
  setenv("JAXDISAGG_LIBCUDA", "libc.so.6", 1);
  CHECK_FAILS(CudaDriver::open().status(), Code::kUnavailable, "lacks cu");
  unsetenv("JAXDISAGG_LIBCUDA");
}

TEST(driver_is_opened_once) {
  FakeDriver fake;
  auto first = CudaDriver::open();
  CHECK_OK(first.status());
  auto second = CudaDriver::open();
  CHECK(*first == *second);
  g_at_the_end.driver = *first;
  CHECK((*first)->flush_gpu_direct_rdma_writes != nullptr);
  CHECK((*first)->mem_get_handle_for_address_range != nullptr);
  CHECK_OK((*first)->check(cuda::kSuccess, "nothing"));
  CHECK_FAILS((*first)->check(cuda::kOutOfMemory, "pinning", Code::kRegistration),
              Code::kRegistration, "pinning: CUDA_ERROR_OUT_OF_MEMORY");
  CHECK_FAILS((*first)->check(12345, "this"), Code::kUnavailable, "this: CUDA error 12345");
}

TEST(device_holds_its_context) {
  FakeDriver fake;
  fake_cuda_set_devices(2);
  CHECK_FAILS(CudaDevice::open(2).status(), Code::kInvalid, "this process sees 2");
  CHECK_FAILS(CudaDevice::open(-1).status(), Code::kInvalid, "CUDA device -1");
  fake_cuda_fail("cuDevicePrimaryCtxRetain", cuda::kOutOfMemory, 0, 1);
  CHECK_FAILS(CudaDevice::open(1).status(), Code::kUnavailable, "CUDA_ERROR_OUT_OF_MEMORY");
  CHECK_EQ(fake_cuda_live("context"), 0);
  auto device = CudaDevice::open(1);
  CHECK_OK(device.status());
  CHECK_EQ(fake_cuda_live("context"), 1);
  fake_cuda_set_attribute(1, cuda::kAttributeRdmaWritesOrdering, cuda::kOrderingOwner);
  auto ordering = (*device)->attribute(cuda::kAttributeRdmaWritesOrdering);
  CHECK_OK(ordering.status());
  CHECK_EQ(*ordering, cuda::kOrderingOwner);

  const CudaDriver& driver = (*device)->driver();
  cuda::Stream stream = nullptr;
  CHECK_EQ(driver.stream_create(&stream, 0), cuda::kInvalidContext);  // none is current
  {
    CudaCurrent current(**device);
    CHECK_OK(current.status());
    CHECK_EQ(driver.stream_create(&stream, 0), cuda::kSuccess);
    CHECK_EQ(driver.stream_destroy(stream), cuda::kSuccess);
  }
  CHECK_EQ(driver.stream_create(&stream, 0), cuda::kInvalidContext);
  fake_cuda_fail("cuCtxPushCurrent_v2", cuda::kInvalidContext, 0, 1);
  CHECK_FAILS(CudaCurrent(**device).status(), Code::kUnavailable, "cannot be made current");
  CHECK_EQ(driver.stream_create(&stream, 0), cuda::kInvalidContext);  // nothing was popped
  device->reset();
  CHECK_EQ(fake_cuda_live("context"), 0);
}

TEST(fake_handles_belong_to_their_context) {
  FakeDriver fake;
  auto one = CudaDevice::open(0), other = CudaDevice::open(1);
  const CudaDriver& driver = (*one)->driver();
  cuda::Stream stream = nullptr;
  cuda::Event events[2] = {};
  {
    CudaCurrent current(**one);
    CHECK_EQ(driver.stream_create(&stream, cuda::kStreamNonBlocking), cuda::kSuccess);
    CHECK_EQ(driver.event_create(&events[0], cuda::kEventDisableTiming), cuda::kSuccess);
  }
  CudaCurrent current(**other);
  CHECK_EQ(driver.event_create(&events[1], cuda::kEventDisableTiming), cuda::kSuccess);
  CHECK_EQ(driver.event_record(events[1], stream), cuda::kInvalidHandle);
  CHECK_EQ(driver.event_record(events[1], nullptr), cuda::kSuccess);
  CHECK_EQ(driver.event_record(events[0], stream), cuda::kSuccess);
  fake_cuda_drain(stream);
  for (const cuda::Event event : events) {
    CHECK_EQ(driver.event_destroy(event), cuda::kSuccess);
  }
  CHECK_EQ(driver.stream_destroy(stream), cuda::kSuccess);
}

TEST(fake_captures_break_by_what_is_forbidden) {
  FakeDriver fake;
  auto device = CudaDevice::open(0);
  const CudaDriver& driver = (*device)->driver();
  CudaCurrent current(**device);
  cuda::Stream stream = nullptr;
  cuda::Event event = nullptr;
  void* memory = nullptr;
  CHECK_EQ(driver.stream_create(&stream, cuda::kStreamNonBlocking), cuda::kSuccess);
  CHECK_EQ(driver.event_create(&event, cuda::kEventDisableTiming), cuda::kSuccess);
  CHECK_EQ(driver.mem_host_alloc(&memory, 100, cuda::kHostAllocPortable), cuda::kSuccess);
  int pageable = 0;
  const auto address = reinterpret_cast<uint64_t>(&pageable);
  const std::vector<std::function<cuda::Error()>> forbidden = {
      [&] { return driver.mem_host_alloc(&memory, 100, 0); },
      [&] { return driver.mem_free_host(memory); },
      [&] { return driver.event_query(event); },
      [&] { return driver.memcpy_dtoh_async(&pageable, address, 4, stream); },
      [&] { return driver.memcpy_dtoh_async(memory, address, 4, nullptr); },
  };
  for (const auto& call : forbidden) {
    fake_cuda_begin_capture(stream);
    CHECK_EQ(driver.memcpy_dtoh_async(memory, address, 4, stream), cuda::kSuccess);
    CHECK_EQ(call(), 900);
    CHECK(fake_cuda_end_capture() == nullptr);
  }
  CHECK_EQ(driver.mem_free_host(memory), cuda::kSuccess);
  CHECK_EQ(driver.event_destroy(event), cuda::kSuccess);
  CHECK_EQ(driver.stream_destroy(stream), cuda::kSuccess);
}

TEST(fake_streams_keep_their_order) {
  FakeDriver fake;
  auto device = CudaDevice::open(0);
  CHECK_OK(device.status());
  const CudaDriver& driver = (*device)->driver();
  CudaCurrent current(**device);
  cuda::Stream stream = nullptr;
  cuda::Event event = nullptr;
  CHECK_EQ(driver.stream_create(&stream, cuda::kStreamNonBlocking), cuda::kSuccess);
  CHECK_EQ(driver.event_create(&event, cuda::kEventDisableTiming), cuda::kSuccess);
  CHECK_EQ(driver.event_query(event), cuda::kSuccess);  // never recorded
  fake_cuda_set_delay(7, 300);
  int a = 1, b = 0, c = 0;
  const auto device_pointer = [](void* memory) { return reinterpret_cast<uint64_t>(memory); };
  for (int round = 0; round < 20; ++round) {
    a = round + 1;
    fake_cuda_hold(1);
    CHECK_EQ(driver.memcpy_dtod_async(device_pointer(&b), device_pointer(&a), sizeof a, stream),
             cuda::kSuccess);
    CHECK_EQ(driver.memcpy_dtoh_async(&c, device_pointer(&b), sizeof b, stream), cuda::kSuccess);
    CHECK_EQ(driver.event_record(event, stream), cuda::kSuccess);
    CHECK_EQ(driver.event_query(event), cuda::kNotReady);
    fake_cuda_hold(0);
    CHECK(check::eventually([&] { return driver.event_query(event) == cuda::kSuccess; }));
    CHECK_EQ(c, round + 1);
  }
  fake_cuda_hold(1);
  CHECK_EQ(driver.memcpy_htod_async(device_pointer(&b), &a, sizeof a, stream), cuda::kSuccess);
  b = 0;
  fake_cuda_hold(0);
  fake_cuda_drain(stream);
  CHECK_EQ(b, a);
  CHECK(logged("ran cuMemcpyDtoHAsync_v2"));
  CHECK_EQ(driver.event_destroy(event), cuda::kSuccess);
  CHECK_EQ(driver.stream_destroy(stream), cuda::kSuccess);
  CHECK_EQ(driver.stream_destroy(stream), cuda::kInvalidHandle);
}
