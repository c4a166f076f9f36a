// The 32-bit immediate of every write: slot above, weight (number of units) below (R2).
#pragma once

#include <cstdint>

namespace ffi_transport {

class ImmediateCodec {
 public:
  static constexpr uint32_t kWeightBits = 12;
  static constexpr uint32_t kMaxWeight = (1u << kWeightBits) - 1;
  static constexpr uint32_t kMaxSlotBits = 32 - kWeightBits;

  // slot_bits in 1..20; a test takes few to see slots wrap.
  explicit constexpr ImmediateCodec(uint32_t slot_bits) : slot_count_(1u << slot_bits) {}

  constexpr uint32_t slot_count() const { return slot_count_; }
  constexpr uint32_t encode(uint32_t slot, uint32_t weight) const {
    return (slot << kWeightBits) | weight;
  }
  // Returns false for an immediate that no peer of ours can have sent.
  constexpr bool decode(uint32_t immediate, uint32_t* slot, uint32_t* weight) const {
    *slot = immediate >> kWeightBits;
    *weight = immediate & kMaxWeight;
    return *slot < slot_count_ && *weight != 0;
  }

 private:
  uint32_t slot_count_;
};

}  // namespace ffi_transport
