#include "cuda_trigger.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "trigger_hub.h"

namespace ffi_transport {
namespace {

std::atomic<SlotBoard*> g_boards[TriggerRegistry::kEngines];

cuda::Error copy_x(const CudaDriver& driver, const CudaTrigger& trigger) {
  if (trigger.out == trigger.x || trigger.bytes == 0) return cuda::kSuccess;
  return driver.memcpy_dtod_async(trigger.out, trigger.x, trigger.bytes, trigger.stream);
}

}  // namespace

void CudaTriggers::install(int engine, std::shared_ptr<SlotBoard> board) {
  static std::mutex mutex;
  // Never destroyed either: the driver may be gone before it would be.
  static auto* const kept = new std::vector<std::shared_ptr<SlotBoard>>;
  std::lock_guard lock(mutex);
  g_boards[engine].store(board.get(), std::memory_order_release);
  kept->push_back(std::move(board));
}

cuda::Error CudaTriggers::enqueue(const CudaTrigger& trigger) noexcept {
  SlotBoard* board = nullptr;
  if (trigger.engine >= 0 && trigger.engine < TriggerRegistry::kEngines) {
    board = g_boards[trigger.engine].load(std::memory_order_acquire);
  }
  const int place = board == nullptr ? -1 : board->place(trigger.ordinal);
  if (board == nullptr || !board->has(place, trigger.layer)) {
    // Nobody asked for this trigger. x has to go on all the same, in the context that XLA made
    // current.
    if (trigger.out == trigger.x) return cuda::kSuccess;
    auto driver = CudaDriver::open();
    return driver.ok() ? copy_x(**driver, trigger) : cuda::kNotSupported;
  }
  const CudaDevice& device = board->device(place);
  const CudaDriver& driver = device.driver();
  const CudaCurrent current(device);
  const cuda::Error copied = copy_x(driver, trigger);
  board->note_address(place, trigger.layer, trigger.cache);
  const cuda::Error stored = driver.memcpy_dtoh_async(
      board->slot(place, trigger.layer), trigger.step, sizeof(int32_t), trigger.stream);
  if (stored != cuda::kSuccess) board->note_refusal(place, trigger.layer, stored);
  return copied;
}

}  // namespace ffi_transport
