// How device memory is registered: by a dma-buf, by its address, or not at all.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "device_memory.h"
#include "device_nodes.h"

using namespace check;
using namespace ffi_transport;

namespace {

constexpr PageUnit kWhole{4096, 0, 4096, 0, 4096};

struct Taken {
  std::vector<DeviceRange> ranges;
  std::vector<bool> open;  // whether the dma-buf was a live descriptor
};

EngineOptions reaching(Taken* taken, bool dmabuf, bool refuse_dmabuf = false) {
  EngineOptions how = options();
  how.device_memory = DeviceMemory::kDirect;
  how.loopback.dmabuf = dmabuf;
  how.loopback.take_device_memory = [=](const DeviceRange& range) {
    taken->ranges.push_back(range);
    taken->open.push_back(fcntl(range.dmabuf, F_GETFD) >= 0);
    if (refuse_dmabuf && range.dmabuf >= 0) return Status(Code::kRegistration, "not these pages");
    return Status();
  };
  return how;
}

std::string mode_of(Node& node, int64_t region) {
  const char* names[] = {"host", "direct", "staged"};
  return names[static_cast<int>(node.engine->memory_mode(region)->first)];
}

// Pinned memory since a test began: slots of earlier ones stay as long as the process.
struct Pinned {
  int before = fake_cuda_live("host");
  int made() const { return fake_cuda_live("host") - before; }
};

}  // namespace

TEST(a_page_range_holds_the_bytes_and_no_page_more) {
  for (const uint64_t page : {4096u, 65536u}) {
    for (const uint64_t address : {0x10000000ull, 0x10000001ull, 0x1000ffffull}) {
      for (const uint64_t length : {1ull, 4095ull, 4096ull, 4097ull, 65536ull, 1000000ull}) {
        const PageRange range = page_range(address, length, page);
        CHECK_EQ(range.address % page, 0u);
        CHECK_EQ(range.length % page, 0u);
        CHECK(range.address <= address && address < range.address + page);
        CHECK(range.address + range.length >= address + length);
        CHECK(range.address + range.length < address + length + page);
      }
    }
  }
}

TEST(device_memory_is_registered_by_its_dma_buf) {
  FakeDriver driver;
  const Pinned pinned;
  fake_cuda_set_attribute(2, cuda::kAttributeDmaBuf, 1);
  fake_cuda_set_attribute(2, cuda::kAttributeRdmaWritesOrdering, cuda::kOrderingAllDevices);
  Taken taken;
  Node a(with_domains(reaching(&taken, true), 2)), b(options());
  DeviceBuffer from(a, 1 << 20, 2);
  CHECK_EQ(mode_of(a, from.region), "direct");
  CHECK_EQ(mode_of(a, a.region), "host");
  CHECK_EQ(taken.ranges.size(), 2u);
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (size_t i = 0; i < 2; ++i) {
    const DeviceRange& range = taken.ranges[i];
    CHECK_EQ(range.address, from.address());
    CHECK_EQ(range.length, uint64_t{1 << 20});
    CHECK_EQ(range.device, 2);
    CHECK_EQ(range.dmabuf_base, from.address() / page * page);
    CHECK(taken.open[i]);
    CHECK(fcntl(range.dmabuf, F_GETFD) < 0);  // closed again: the provider keeps its own
  }
  // The NIC reads it: no copy is made.
  const int64_t peer = connect(a, b);
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->write_paged(transfer, from.region, b.remote, shuffled(256, 1), kWhole));
  CHECK_OK(a.engine->seal(transfer));
  CHECK_EQ(a.wait(EventKind::kTransferEnded).outcome,
           static_cast<int>(TransferOutcome::kCompleted));
  CHECK_EQ(count_in_log("cuMemcpyDtoHAsync"), 0u);
  CHECK_EQ(pinned.made(), 0);
  CHECK_EQ(a.stat("regions_direct"), 1u);
  CHECK_EQ(a.stat("regions_staged"), 0u);
  CHECK_OK(a.engine->deregister(from.region));
}

TEST(device_memory_without_a_dma_buf_is_registered_by_its_address) {
  FakeDriver driver;
  struct Case {
    bool provider, device, refuses, export_fails;
    size_t attempts;
  };
  for (const Case& one : {Case{false, true, false, false, 1}, Case{true, false, false, false, 1},
                          Case{true, true, true, false, 2}, Case{true, true, false, true, 1}}) {
    fake_cuda_reset();
    fake_cuda_set_attribute(0, cuda::kAttributeDmaBuf, one.device);
    fake_cuda_set_attribute(0, cuda::kAttributeRdmaWritesOrdering, cuda::kOrderingAllDevices);
    if (one.export_fails) {
      fake_cuda_fail("cuMemGetHandleForAddressRange", cuda::kNotSupported, 0, 1);
    }
    Taken taken;
    Node a(reaching(&taken, one.provider, one.refuses));
    DeviceBuffer from(a, 1 << 20);
    CHECK_EQ(mode_of(a, from.region), "direct");
    CHECK_EQ(taken.ranges.size(), one.attempts);
    CHECK_EQ(taken.ranges.back().dmabuf, -1);
    CHECK_EQ(taken.ranges.back().address, from.address());
  }
}

TEST(device_memory_that_no_nic_reaches_is_staged_or_refused) {
  FakeDriver driver;
  {
    Node a(options());
    DeviceBuffer from(a, 1 << 20);
    CHECK_EQ(mode_of(a, from.region), "staged");
    CHECK(a.engine->memory_mode(from.region)->second.find("FI_HMEM") != std::string::npos);
    CHECK_EQ(a.stat("regions_staged"), 1u);
  }
  std::vector<char> memory(4096);
  const auto address = reinterpret_cast<uint64_t>(memory.data());
  {
    // The provider refuses: with "auto" that is no reason not to serve.
    for (const int device : {0, 3}) {
      fake_cuda_set_attribute(device, cuda::kAttributeRdmaWritesOrdering,
                              cuda::kOrderingAllDevices);
    }
    Taken taken;
    EngineOptions how = reaching(&taken, false);
    how.loopback.take_device_memory = [](const DeviceRange&) {
      return Status(Code::kRegistration, "no peer memory module");
    };
    Node direct(how);
    const Status refused =
        direct.engine->register_memory(address, memory.size(), std::nullopt, 3).status();
    CHECK_FAILS(refused, Code::kRegistration, "no peer memory module");
    CHECK_FAILS(refused, Code::kRegistration, "CUDA device 3");
    how.device_memory = DeviceMemory::kAuto;
    how.loopback.device_memory = true;
    Node a(how);
    DeviceBuffer from(a, 1 << 20);
    CHECK_EQ(mode_of(a, from.region), "staged");
    CHECK(a.engine->memory_mode(from.region)->second.find("no peer memory module") !=
          std::string::npos);
  }
  {
    Taken taken;
    EngineOptions how = reaching(&taken, true);
    how.device_memory = DeviceMemory::kStaged;
    how.loopback.device_memory = true;
    Node a(how);
    DeviceBuffer from(a, 1 << 20);
    CHECK_EQ(mode_of(a, from.region), "staged");
    CHECK(taken.ranges.empty());
  }
}

TEST(device_memory_whose_writes_cannot_be_made_visible_is_not_direct) {
  FakeDriver driver;
  // Not visible by itself, and no flush that the host may call.
  fake_cuda_set_attribute(0, cuda::kAttributeRdmaWritesOrdering, cuda::kOrderingNone);
  fake_cuda_set_attribute(0, cuda::kAttributeFlushWritesOptions, 0);
  EngineOptions how = options();
  how.loopback.device_memory = true;
  Node a(how);
  DeviceBuffer from(a, 1 << 20);
  CHECK_EQ(mode_of(a, from.region), "staged");
}

TEST(device_memory_is_checked_when_it_is_registered) {
  std::vector<char> memory(4096);
  const auto address = reinterpret_cast<uint64_t>(memory.data());
  const auto registered = [&](Node& node, int device) {
    return node.engine->register_memory(address, memory.size(), std::nullopt, device).status();
  };
  {
    setenv("JAXDISAGG_LIBCUDA", "/nowhere/libcuda.so.1", 1);
    Node a;
    const Status status = registered(a, 0);
    CHECK_FAILS(status, Code::kUnavailable, "CUDA's driver");
    CHECK_EQ(status.detail().missing, "libcuda.so.1");
  }
  FakeDriver driver;
  Node a;
  CHECK_FAILS(registered(a, 8), Code::kInvalid, "this process sees 8");
  CHECK_FAILS(registered(a, -1), Code::kInvalid, "CUDA device -1");
  fake_cuda_set_pointer(address, memory.size(), 5);
  CHECK_FAILS(registered(a, 4), Code::kInvalid, "is CUDA device 5's, not 4's");
  CHECK_OK(registered(a, 5));
  const auto of_length = [&](uint64_t length, std::optional<int> device) {
    return a.engine->register_memory(address, length, std::nullopt, device).status();
  };
  CHECK_FAILS(of_length(memory.size() + 1, 5), Code::kInvalid,
              "length: 4097 bytes end beyond what was allocated on CUDA device 5");
  fake_cuda_set_pointer(address + memory.size(), 64, 6);
  CHECK_FAILS(of_length(memory.size() + 1, 5), Code::kInvalid, "is CUDA device 6's, not 5's");
  fake_cuda_set_pointer(address + memory.size(), 64, 5);
  CHECK_OK(of_length(memory.size() + 1, 5));  // one range may be mapped of several
  for (const std::optional<int> device : {std::optional<int>(), std::optional<int>(5)}) {
    CHECK_FAILS(of_length(~uint64_t{0} - 4095, device), Code::kInvalid, "end beyond all memory");
  }
}

TEST(closed_engines_keep_the_mirrors_that_hung_copies_read) {
  FakeDriver driver;
  EngineOptions how = options();
  how.arrival_timeout_ms = 50;
  std::vector<char> memory(64 * 4096, 'p');
  {
    Node node(how);
    auto made = node.engine->register_memory(reinterpret_cast<uint64_t>(memory.data()),
                                             memory.size(), std::nullopt, 1);
    CHECK_OK(made.status());
    std::memset((*made)->mirror->address(), 'a', memory.size());
    const std::vector<Engine::LandingRequest> landings{{{(*made)->id}, {0, 1, 5}, 4096}};
    made = Status(Code::kClosed, "the engine is the last owner");
    fake_cuda_hold(1);
    CHECK_OK(node.engine->arm(1, 0, false, landings));
    CHECK(eventually([] { return count_in_log("cuEventRecord") > 0; }));
    CHECK_EQ(node.engine->close(), 1u);
    CHECK_EQ(node.engine->close(), 0u);
    CHECK_FAILS(node.engine->arm(2, 1, false, landings), Code::kClosed, "the engine is closed");
    CHECK_FAILS(node.engine->arm(2, 1, false, {}), Code::kClosed, "the engine is closed");
  }
  fake_cuda_hold(0);  // and now they do run
  CHECK(eventually([] { return count_in_log("ran cuEventRecord") > 0; }));
  for (const size_t page : {0, 1, 5}) CHECK_EQ(memory[page * 4096], 'a');
  CHECK_EQ(memory[2 * 4096], 'p');
}

TEST(pinned_memory_is_had_by_who_sends_and_not_before) {
  FakeDriver driver;
  const Pinned pinned;
  EngineOptions small = options();
  small.staging_bytes = 5 << 20;
  Node a(with_domains(small, 3)), b;
  DeviceBuffer thin(a, 4096, 5), wide(b, 4096, 5), second(b, 8192, 5);
  const int64_t from_a = *a.engine->open_transfer(connect(a, b), 1);
  const int64_t from_b = *b.engine->open_transfer(connect(b, a), 1);
  const auto write = [](Node& from, int64_t transfer, const DeviceBuffer& what, Node& to) {
    return from.engine->write(transfer, what.region, 0, to.remote, 0, 4096, 1);
  };
  CHECK_EQ(pinned.made(), 0);
  CHECK_FAILS(write(a, from_a, thin, b), Code::kInvalid, "staging_bytes: 1747626 for each domain");
  fake_cuda_fail("cuMemHostAlloc", cuda::kOutOfMemory, 0, 1);
  CHECK_FAILS(write(b, from_b, wide, a), Code::kUnavailable, "pinned memory (staging_bytes)");
  fake_cuda_fail("cuStreamCreate", cuda::kOutOfMemory, 0, 1);
  CHECK_FAILS(b.engine->set_source_region(0, 0, wide.region), Code::kUnavailable,
              "a stream for copies");
  CHECK_EQ(pinned.made(), 0);
  CHECK_OK(b.engine->set_source_region(0, 0, wide.region));
  CHECK_EQ(pinned.made(), 1);
  CHECK_OK(write(b, from_b, second, a));  // the ring is there already
  CHECK_EQ(pinned.made(), 1);
}
