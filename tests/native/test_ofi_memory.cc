// What libfabric is asked for, and told of memory, over a fake of it.
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "fake_libfabric.h"
#include "ofi_fabric.h"

using namespace ffi_transport;

namespace {

constexpr uint64_t kAddress = 0x7f0000001200;
constexpr uint64_t kBase = 0x7f0000001000;

// The fake's functions: it is opened, as the engine opens it.
struct Fake {
  decltype(&fake_libfabric_set_version) set_version;
  decltype(&fake_libfabric_set_answers) set_answers;
  decltype(&fake_libfabric_set_option_answer) set_option_answer;
  decltype(&fake_libfabric_set_key) set_key;
  decltype(&fake_libfabric_log) log;

  Fake() {
    void* library = dlopen(FAKE_LIBFABRIC_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    find(library, "fake_libfabric_set_version", &set_version);
    find(library, "fake_libfabric_set_answers", &set_answers);
    find(library, "fake_libfabric_set_option_answer", &set_option_answer);
    find(library, "fake_libfabric_set_key", &set_key);
    find(library, "fake_libfabric_log", &log);
    decltype(&fake_libfabric_reset) reset;
    find(library, "fake_libfabric_reset", &reset);
    reset();
  }
  template <class Function>
  static void find(void* library, const char* name, Function* out) {
    *out = reinterpret_cast<Function>(dlsym(library, name));
    CHECK(*out != nullptr);
  }
};

std::unique_ptr<Domain> open(DeviceMemoryWish wish) {
  auto fabric = open_ofi({"efa", "127.0.0.1", FAKE_LIBFABRIC_LIBRARY, false, wish});
  CHECK_OK(fabric.status());
  auto domain = (*fabric)->open_domain("");
  CHECK_OK(domain.status());
  CHECK_EQ((*domain)->name(), "rdmap0-rdm");
  return domain.take();
}

}  // namespace

TEST(libfabric_is_asked_for_device_memory_only_when_it_is_wanted) {
  Fake fake;
  const auto plain = open(DeviceMemoryWish::kNone);
  CHECK_EQ(std::string(fake.log()), "getinfo 1.17\n");
  CHECK(!plain->limits().device_memory);
  CHECK(!plain->limits().dmabuf);
  for (const DeviceMemoryWish wish : {DeviceMemoryWish::kHardware, DeviceMemoryWish::kAny}) {
    Fake fake;
    const auto domain = open(wish);
    CHECK_EQ(std::string(fake.log()), "getinfo 1.20 hmem mr_hmem\n");
    CHECK(domain->limits().device_memory);
    CHECK(domain->limits().dmabuf);
  }
}

TEST(libfabric_without_device_memory_is_used_without_it) {
  Fake fake;
  fake.set_answers(0, 0, 0);
  const auto domain = open(DeviceMemoryWish::kHardware);
  // With delivery completion and without, then the same of the plain interface.
  CHECK_EQ(std::string(fake.log()),
           "getinfo 1.20 hmem mr_hmem\ngetinfo 1.20 hmem mr_hmem\ngetinfo 1.17\n");
  CHECK(!domain->limits().device_memory);
  CHECK(!domain->limits().dmabuf);
}

TEST(libfabric_before_1_20_is_not_asked_for_dma_bufs) {
  Fake fake;
  fake.set_version(FI_VERSION(1, 17));
  const auto domain = open(DeviceMemoryWish::kHardware);
  CHECK_EQ(std::string(fake.log()), "getinfo 1.17 hmem mr_hmem\n");
  CHECK(domain->limits().device_memory);
  CHECK(!domain->limits().dmabuf);
  fake.set_version(FI_VERSION(2, 5));
  CHECK(open(DeviceMemoryWish::kHardware)->limits().dmabuf);
}

TEST(libfabric_is_told_where_device_memory_lies) {
  Fake fake;
  const auto domain = open(DeviceMemoryWish::kHardware);
  const auto told = [&](const DeviceRange& range) {
    const size_t before = std::string(fake.log()).size();
    auto registration = domain->register_device_memory(range);
    CHECK_OK(registration.status());
    CHECK_EQ((*registration)->key(), 77u);
    CHECK_EQ((*registration)->base(), kAddress);  // FI_MR_VIRT_ADDR: the memory's, not the page's
    return std::string(fake.log()).substr(before);
  };
  CHECK_EQ(told({kAddress, 5000, 3}),
           "register address 0x7f0000001200 length 5000 iface 1 device 3 count 1 unused 1\n");
  const int fd = memfd_create("dmabuf", MFD_CLOEXEC);
  CHECK_EQ(told({kAddress, 5000, 3, fd, kBase}),
           "register dmabuf open base 0x7f0000001000 offset 512 length 5000 iface 1 device 3 "
           "count 1 unused 1\n");
  close(fd);
  char memory[100];
  const size_t before = std::string(fake.log()).size();
  CHECK_OK(domain->register_memory(memory, sizeof memory).status());
  CHECK(
      std::string(fake.log()).substr(before).find("length 100 iface 0 device 0 count 1 unused 1") !=
      std::string::npos);
}

TEST(libfabric_that_refuses_memory_says_so) {
  Fake fake;
  fake.set_answers(1, -FI_EOPNOTSUPP, -FI_EFAULT);
  const auto domain = open(DeviceMemoryWish::kHardware);
  CHECK_FAILS(domain->register_device_memory({kAddress, 5000, 3, 0, kBase}).status(),
              Code::kRegistration, "registering 5000 bytes: Operation not supported");
  CHECK_FAILS(domain->register_device_memory({kAddress, 5000, 3}).status(), Code::kRegistration,
              "Bad address");
}

// A provider may report success without having registered anything.
TEST(libfabric_that_gives_no_key_has_registered_nothing) {
  Fake fake;
  fake.set_key(FI_KEY_NOTAVAIL);
  const auto domain = open(DeviceMemoryWish::kHardware);
  CHECK_FAILS(domain->register_device_memory({kAddress, 5000, 3, 0, kBase}).status(),
              Code::kRegistration, "registering 5000 bytes: the provider gave no key");
  char memory[100];
  CHECK_FAILS(domain->register_memory(memory, sizeof memory).status(), Code::kRegistration,
              "no key");
}

TEST(libfabric_is_asked_to_call_no_cuda_for_device_memory) {
  Fake fake;
  const auto plain = open(DeviceMemoryWish::kNone);
  CHECK_OK(plain->open_endpoint(0).status());
  CHECK_EQ(std::string(fake.log()), "getinfo 1.17\nenable\n");
  // One that does not know the option, or cannot do without CUDA, is used all the same.
  for (const int answer : {0, -FI_ENOPROTOOPT, -FI_EOPNOTSUPP}) {
    Fake fake;
    fake.set_option_answer(answer);
    const auto domain = open(DeviceMemoryWish::kHardware);
    CHECK_OK(domain->open_endpoint(0).status());
    CHECK_EQ(std::string(fake.log()),
             "getinfo 1.20 hmem mr_hmem\noption cuda_permitted false bytes 1\nenable\n");
  }
}
