// A transfer: all writes of one request to one peer. It ends once, as completed, cancelled or
// failed, and only when none of its writes is in flight.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "event_queue.h"
#include "lanes.h"
#include "status.h"

namespace ffi_transport {

class TransferTable;

class Transfer {
 public:
  Transfer(int64_t id, int64_t peer, uint32_t slot, std::shared_ptr<PeerLanes> lanes,
           EventQueue* events, TransferTable* table)
      : id_(id),
        peer_(peer),
        slot_(slot),
        lanes_(std::move(lanes)),
        events_(events),
        table_(table) {}

  int64_t id() const { return id_; }
  int64_t peer() const { return peer_; }
  uint32_t slot() const { return slot_; }
  PeerLanes& lanes() const { return *lanes_; }

  enum class Plan { kPlanned, kEnded, kSealed };
  // Adds units that will be posted. Nothing is planned on a transfer that failed or was cancelled.
  Plan plan(uint64_t units);

  // Around every post: begin_post is the check of the cancel mark (R15), and counts the write as
  // in flight before it is. Then either finish_post at its completion or abandon_post.
  bool begin_post();
  void abandon_post();
  void finish_post(uint64_t units, uint64_t bytes);

  void seal();
  void cancel();
  void fail(const std::string& error);
  bool postable() const;

 private:
  void end_if_due(std::unique_lock<std::mutex>& lock);

  const int64_t id_;
  const int64_t peer_;
  const uint32_t slot_;
  const std::shared_ptr<PeerLanes> lanes_;
  EventQueue* const events_;
  TransferTable* const table_;

  mutable std::mutex mutex_;
  uint64_t planned_ = 0;
  uint64_t done_ = 0;
  uint64_t bytes_ = 0;
  uint64_t in_flight_ = 0;
  bool sealed_ = false;
  bool cancelled_ = false;
  bool failed_ = false;
  bool ended_ = false;
  std::string error_;
};

using TransferPtr = std::shared_ptr<Transfer>;

// The live transfers by id. Locks nest in this order: transfer, then table or event queue.
class TransferTable {
 public:
  explicit TransferTable(EventQueue* events) : events_(events) {}

  TransferPtr open(int64_t peer, uint32_t slot, std::shared_ptr<PeerLanes> lanes);
  // Null, with ok, for a transfer that has ended; an error for an id that never was.
  Result<TransferPtr> find(int64_t id) const;
  void erase(int64_t id);
  void fail_peer(int64_t peer, const std::string& error);
  std::vector<TransferPtr> all() const;

 private:
  EventQueue* const events_;
  mutable std::mutex mutex_;
  int64_t next_id_ = 1;
  std::unordered_map<int64_t, TransferPtr> live_;
};

}  // namespace ffi_transport
