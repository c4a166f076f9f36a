// What the engine hands to a domain: writes to post.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packer.h"
#include "region.h"
#include "transfer.h"

namespace ffi_transport {

// Writes to post, in order: units [cursor, end) of a list, from one region into one of a peer's, by
// one lane: from the source_place-th of the source region's domains to the remote_place-th of the
// remote one's.
struct Job {
  TransferPtr transfer;
  RegionPtr source;
  RemoteRegionPtr remote;
  size_t source_place = 0;
  size_t remote_place = 0;
  UnitList units;
  size_t cursor = 0;
  size_t end = 0;
  int64_t step = 0;  // where it came from, for the trace
  int32_t layer = -1;
  int32_t ordinal = -1;
};

}  // namespace ffi_transport
