#include "slot_board.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "trigger_hub.h"

namespace ffi_transport {
namespace {

// Prefetchers fetch lines in pairs.
constexpr size_t kLineBytes = 128;
constexpr size_t kSlotsPerLine = kLineBytes / sizeof(int32_t);

// How far back a slot is set that seems to be ahead: no step of the sequence can have been there
// lately, and it takes as many steps again until it seems to be ahead once more.
constexpr uint32_t kLongAgo = 1u << 30;

}  // namespace

Result<std::shared_ptr<SlotBoard>> SlotBoard::create(const std::vector<int>& ordinals, int layers,
                                                     bool device) {
  if (layers < 1 || layers > TriggerHub::kLayers) {
    return Status(Code::kInvalid, "layers: " + std::to_string(layers) + " is not in 1.." +
                                      std::to_string(TriggerHub::kLayers));
  }
  if (ordinals.empty() || ordinals.size() > static_cast<size_t>(TriggerHub::kOrdinals)) {
    return Status(Code::kInvalid, "ordinals: " + std::to_string(ordinals.size()) +
                                      " of them, not 1.." + std::to_string(TriggerHub::kOrdinals));
  }
  for (size_t i = 0; i < ordinals.size(); ++i) {
    const std::string text = std::to_string(ordinals[i]);
    if (ordinals[i] < 0) return Status(Code::kInvalid, "ordinals: " + text + " is negative");
    if (std::find(ordinals.begin(), ordinals.begin() + i, ordinals[i]) != ordinals.begin() + i) {
      return Status(Code::kInvalid, "ordinals: " + text + " is there twice");
    }
  }
  std::shared_ptr<SlotBoard> board(new SlotBoard(ordinals, layers));
  if (Status status = board->allocate(device); !status.ok()) return status;
  return board;
}

SlotBoard::SlotBoard(std::vector<int> ordinals, int layers)
    : ordinals_(std::move(ordinals)),
      layers_(layers),
      stride_((layers + kSlotsPerLine - 1) / kSlotsPerLine * kSlotsPerLine),
      addresses_(new std::atomic<uint64_t>[ordinals_.size() * layers]()) {}

Status SlotBoard::allocate(bool device) {
  const size_t count = ordinals_.size() * stride_;
  void* memory = nullptr;
  if (device) {
    for (const int ordinal : ordinals_) {
      auto opened = CudaDevice::open(ordinal);
      if (!opened.ok()) return opened.status();
      devices_.push_back(opened.take());
    }
    CudaCurrent current(*devices_[0]);
    if (!current.status().ok()) return current.status();
    const CudaDriver& driver = devices_[0]->driver();
    // Portable: every device stores into its part. Not write-combined: the host reads.
    Status status = driver.check(
        driver.mem_host_alloc(&memory, count * sizeof(int32_t), cuda::kHostAllocPortable),
        "the triggers' slots cannot be pinned");
    if (!status.ok()) return status;
  } else {
    memory = std::aligned_alloc(kLineBytes, count * sizeof(int32_t));
    if (memory == nullptr) return Status(Code::kUnavailable, "no memory for the triggers' slots");
  }
  slots_ = static_cast<int32_t*>(memory);
  std::fill(slots_, slots_ + count, 0);
  return {};
}

SlotBoard::~SlotBoard() {
  if (devices_.empty()) {
    std::free(slots_);
  } else if (slots_ != nullptr) {
    CudaCurrent current(*devices_[0]);
    devices_[0]->driver().mem_free_host(slots_);
  }
}

int SlotBoard::place(int ordinal) const {
  for (size_t i = 0; i < ordinals_.size(); ++i) {
    if (ordinals_[i] == ordinal) return static_cast<int>(i);
  }
  return -1;
}

void SlotBoard::prepare(int place, int layers, uint32_t step) {
  for (int layer = 0; layer < layers; ++layer) {
    if (!reached(load(place, layer), step)) continue;
    store(place, layer, static_cast<int32_t>(step - kLongAgo));
  }
}

void SlotBoard::note_refusal(int place, int layer, cuda::Error error) {
  const auto packed = static_cast<uint64_t>(static_cast<uint32_t>(error)) << 32 |
                      static_cast<uint64_t>(place) << 16 | static_cast<uint64_t>(layer);
  uint64_t none = 0;
  refusal_.compare_exchange_strong(none, packed, std::memory_order_relaxed);
}

bool SlotBoard::take_refusal(Refusal* refusal) {
  if (refusal_.load(std::memory_order_relaxed) == 0) return false;
  const uint64_t packed = refusal_.exchange(0, std::memory_order_relaxed);
  refusal->error = static_cast<cuda::Error>(packed >> 32);
  refusal->ordinal = ordinals_[packed >> 16 & 0xFFFF];
  refusal->layer = static_cast<int>(packed & 0xFFFF);
  return true;
}

}  // namespace ffi_transport
