// Where a device says how far a step has come, in its own stream's order (M8): one 32-bit slot of
// host memory for each (ordinal, layer), into which the program has the step's number copied once
// the layer is written. Nobody waits for anybody: a value may be overwritten before it is seen.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_driver.h"
#include "status.h"

namespace ffi_transport {

class SlotBoard {
 public:
  // Slots of these devices. With `device` the memory is pinned, so that the devices' copies reach
  // it, and a device's primary context is held; else it is plain and `store` plays the device.
  static Result<std::shared_ptr<SlotBoard>> create(const std::vector<int>& ordinals, int layers,
                                                   bool device);
  ~SlotBoard();
  SlotBoard(const SlotBoard&) = delete;
  SlotBoard& operator=(const SlotBoard&) = delete;

  const std::vector<int>& ordinals() const { return ordinals_; }
  int layers() const { return layers_; }
  // An ordinal's index here, or -1.
  int place(int ordinal) const;
  bool has(int place, int layer) const { return place >= 0 && layer >= 0 && layer < layers_; }

  // The slot itself, as the target of a copy, and the device that makes it.
  void* slot(int place, int layer) const { return cell(place, layer); }
  const CudaDevice& device(int place) const { return *devices_[place]; }

  // What a trigger's host code knows: where the layer's cache is. It runs when the call is put on
  // the stream, so the address is the one that the stored step, or a later one, computes with.
  void note_address(int place, int layer, const void* cache) {
    addresses_[index(place, layer)].store(reinterpret_cast<uint64_t>(cache),
                                          std::memory_order_relaxed);
  }
  uint64_t address(int place, int layer) const {
    return addresses_[index(place, layer)].load(std::memory_order_relaxed);
  }

  // A CPU's trigger, in the place of the device's copy. Release: see load().
  void store(int place, int layer, int32_t step) {
    std::atomic_ref<int32_t>(*cell(place, layer)).store(step, std::memory_order_release);
  }

  // The last step that was stored. Who sees it may read what the layer wrote, for four reasons that
  // follow one another:
  // 1. The copy into the slot follows the layer's writes in the stream, or in the graph captured
  //    from it, because the call's operands (the cache after the writes; x) are their results. A
  //    device's writes are done, and visible to readers outside it, before work that depends on
  //    them starts.
  // 2. The copy is one aligned write of four bytes, which PCIe delivers whole and does not let
  //    overtake earlier writes of the same device. A NIC that reads the device's memory asks later
  //    still: after 4.
  // 3. This load acquires, so neither the compiler nor this CPU moves anything that follows it
  //    before it. A CPU's store() releases: there 1 and 2 are C++'s own order.
  // 4. From here to the post the ring hands over with release and acquire, and the provider orders
  //    its queue's memory before the doorbell that it rings.
  // That a device keeps to 1 and 2 for a host that polls, without a call that synchronises, is how
  // the hardware is described and is not run here (docs/adr/0011).
  int32_t load(int place, int layer) const {
    return std::atomic_ref<int32_t>(*cell(place, layer)).load(std::memory_order_acquire);
  }

  // Whether a slot that holds `value` has seen `step`, when numbers ascend and wrap at 32 bits.
  static bool reached(int32_t value, uint32_t step) {
    return static_cast<int32_t>(static_cast<uint32_t>(value) - step) >= 0;
  }
  // Before `step` is dispatched: a slot that seems to have seen it holds what nobody of this
  // sequence stored (it is fresh, or warm-up used other numbers), and is set to long ago. A slot
  // that a step in flight may still store into is never written: what it holds, and what comes, is
  // of an earlier step.
  void prepare(int place, int layers, uint32_t step);

  // The first of a device's refusals to take a trigger's copy, until it is taken.
  struct Refusal {
    cuda::Error error = cuda::kSuccess;
    int ordinal = -1;
    int layer = -1;
  };
  void note_refusal(int place, int layer, cuda::Error error);
  bool take_refusal(Refusal* refusal);

 private:
  SlotBoard(std::vector<int> ordinals, int layers);
  Status allocate(bool device);
  size_t index(int place, int layer) const { return static_cast<size_t>(place) * layers_ + layer; }
  int32_t* cell(int place, int layer) const { return slots_ + place * stride_ + layer; }

  const std::vector<int> ordinals_;
  const int layers_;
  const size_t stride_;  // slots from one ordinal's to the next: two devices share no cache line
  int32_t* slots_ = nullptr;
  std::vector<std::shared_ptr<CudaDevice>> devices_;  // none: plain memory
  std::unique_ptr<std::atomic<uint64_t>[]> addresses_;
  std::atomic<uint64_t> refusal_{0};  // packed; 0: none
};

}  // namespace ffi_transport
