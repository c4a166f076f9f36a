// What tests say to the fake CUDA driver (fake_cuda*.cc), which plays libcuda.so.1 over host
// memory. C functions, so that Python calls them too, through tests/support/fake_cuda.py.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {
// Forgets the log, the failures, the attributes, the pointers and the delay; eight devices again.
// Streams, events and memory stay.
void fake_cuda_reset();

void fake_cuda_set_devices(int count);
void fake_cuda_set_attribute(int device, int attribute, int value);
// Memory that the driver takes for `device`'s: [address, address + bytes).
void fake_cuda_set_pointer(uint64_t address, size_t bytes, int device);
// After `skip` more calls of a function, the next `times` return `error` and do nothing.
void fake_cuda_fail(const char* function, int error, int skip, int times);
// Before each operation a stream sleeps from 0 to `most_us` microseconds, drawn from `seed`.
void fake_cuda_set_delay(uint64_t seed, int most_us);
// While held, streams take operations but run none. Held twice is held once.
void fake_cuda_hold(int held);
// Waits until a stream (a cuda::Stream) has run all that it was given.
void fake_cuda_drain(void* stream);
// From now on every call fails, as it does once the process's exit has taken the driver down.
void fake_cuda_shut_down();

// Until the end of it, what this thread gives to the stream is recorded and does not run, and what
// a thread that captures may not do breaks the recording (CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).
void fake_cuda_begin_capture(void* stream);
// What was recorded, for good; null if it was broken.
void* fake_cuda_end_capture();
// Gives all of it to a stream.
void fake_cuda_launch(void* graph, void* stream);

// One line per call, in the order in which they began: "cuFunction arguments". What a
// stream does is logged again when it is done: "ran cuFunction arguments". Mine to keep until
// this thread asks again.
const char* fake_cuda_log();
// A line of the test's own, to see what came before and after it.
void fake_cuda_note(const char* line);

// How many are alive of: "host" (pinned allocations), "stream", "event", "context" (retained
// primary ones). -1 for another word.
int fake_cuda_live(const char* what);

}  // extern "C"
#pragma GCC visibility pop
