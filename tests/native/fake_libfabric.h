// What tests say to the fake libfabric (fake_libfabric.cc): a library with one NIC that opens
// domains and endpoints, registers memory, and does nothing else.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {
// Version 1.20, device memory and dma-bufs; an empty log.
void fake_libfabric_reset();
void fake_libfabric_set_version(uint32_t version);
// Whether it offers FI_HMEM, and what it answers to a dma-buf and to another registration: 0 or a
// negative errno.
void fake_libfabric_set_answers(int device_memory, int to_dmabuf, int to_address);
// What it answers to an endpoint's option: 0 or a negative errno.
void fake_libfabric_set_option_answer(int answer);
// The key of what is registered from now on.
void fake_libfabric_set_key(uint64_t key);
// One line per call: "getinfo 1.20 hmem ...", "register ...", "option ...", "enable". To be read
// before the next call.
const char* fake_libfabric_log();
}
#pragma GCC visibility pop
