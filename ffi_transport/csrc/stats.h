// Counters that Python reads as a dict. Relaxed: each is a number of its own, none orders memory.
#pragma once

#include <atomic>
#include <cstdint>

namespace ffi_transport {

#define FFI_TRANSPORT_STATS(X)                                                     \
  X(bytes_posted)    /* payload of posted writes */                                \
  X(bytes_completed) /* payload of acknowledged writes */                          \
  X(writes_posted)                                                                 \
  X(writes_completed)                                                              \
  X(writes_failed)                                                                 \
  X(writes_fenced) /* in flight when their endpoint was closed */                  \
  X(units_posted)                                                                  \
  X(units_completed)                                                               \
  X(immediates_received)                                                           \
  X(units_received)                                                                \
  X(stale_immediates) /* their slot was not armed: dropped */                      \
  X(units_adopted)    /* early units that an arm with adopt_early took over */     \
  X(immediates_malformed)                                                          \
  X(overshoots)                                                                    \
  X(arrival_copies)      /* from mirrors into devices */                           \
  X(arrival_bytes)       /* of those */                                            \
  X(arrival_flushes)     /* of a NIC's writes into a device (R17) */               \
  X(arrivals_failed)     /* slots whose pages did not come into a device */        \
  X(arrivals_dropped)    /* slots disarmed, or overshot, before they were there */ \
  X(mirrors_kept)        /* for good: copies out of them hung until the end */     \
  X(triggers)            /* calls of the FFI handler, or seen in the slots */      \
  X(slot_values_skipped) /* layers that a later layer or step vouched for */       \
  X(no_plan_triggers)                                                              \
  X(ring_overflows)                                                                \
  X(trigger_faults)                                                                \
  X(plan_writes_skipped) /* planned or fired for a transfer that had ended */      \
  X(posts_deferred)      /* the provider said: again */                            \
  X(staged_writes)       /* copied out of a device to be sent from there */        \
  X(staged_bytes)                                                                  \
  X(staging_waits)    /* a peer's next copy found no room in pinned memory */      \
  X(staging_failures) /* copies that the device refused or failed */               \
  X(regions_direct)   /* of device memory, reached by the NIC itself */            \
  X(regions_staged)   /* of device memory, through pinned memory */                \
  X(control_packets_sent)                                                          \
  X(control_packets_received)                                                      \
  X(control_packets_malformed)                                                     \
  X(control_packets_stale) /* of an unknown session or another epoch */            \
  X(control_packets_duplicate)                                                     \
  X(messages_sent)                                                                 \
  X(messages_received)                                                             \
  X(peers_connected)                                                               \
  X(peers_lost)                                                                    \
  X(thread_blocks) /* times a native thread went to sleep */

struct Stats {
#define FFI_TRANSPORT_FIELD(name) std::atomic<uint64_t> name{0};
  FFI_TRANSPORT_STATS(FFI_TRANSPORT_FIELD)
#undef FFI_TRANSPORT_FIELD
};

// One domain's numbers. Only its own thread writes them.
struct DomainStats {
  std::atomic<uint64_t> units_posted{0};
  std::atomic<uint64_t> bytes_posted{0};
  std::atomic<uint64_t> units_completed{0};
  std::atomic<uint64_t> bytes_completed{0};
  std::atomic<uint64_t> units_counted{0};  // weight of the immediates that came through it
};

// By a counter's only writer: cheaper than a read-modify-write.
inline void bump_own(std::atomic<uint64_t>& counter, uint64_t by) {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

inline void bump(std::atomic<uint64_t>& counter, uint64_t by = 1) {
  counter.fetch_add(by, std::memory_order_relaxed);
}

}  // namespace ffi_transport
