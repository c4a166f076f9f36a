// What the trigger of a program on CUDA puts on the stream. It needs nothing of XLA, so that tests
// call it with a stream of the fake driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cuda_driver.h"
#include "slot_board.h"

namespace ffi_transport {

struct CudaTrigger {
  int32_t engine = 0;
  int32_t ordinal = 0;
  int32_t layer = 0;
  cuda::DevicePtr step = 0;  // an int32 on the device: the host cannot know it, a replay changes it
  cuda::DevicePtr x = 0;
  cuda::DevicePtr out = 0;
  size_t bytes = 0;  // of x and of out
  const void* cache = nullptr;
  cuda::Stream stream = nullptr;
};

// The process-wide table through which a compiled program finds its slots, by its engine's index.
class CudaTriggers {
 public:
  // A board stays for the rest of the process, also when its engine is closed: a captured graph
  // holds the slots' addresses and may be replayed. It is a few KiB per engine, and what an old
  // program stores there nobody reads.
  static void install(int engine, std::shared_ptr<SlotBoard> board);

  // Enqueues x -> out where they are not the same, then step -> the slot of (ordinal, layer), or
  // has a capture record both. Never waits. A slot's copy that is refused is noted on the board; a
  // refused copy of x is returned, because the program cannot be right without it.
  static cuda::Error enqueue(const CudaTrigger& trigger) noexcept;
};

}  // namespace ffi_transport
