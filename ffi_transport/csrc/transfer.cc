#include "transfer.h"

namespace ffi_transport {

Transfer::Plan Transfer::plan(uint64_t units) {
  std::lock_guard lock(mutex_);
  if (cancelled_ || failed_ || ended_) return Plan::kEnded;
  if (sealed_) return Plan::kSealed;
  planned_ += units;
  return Plan::kPlanned;
}

bool Transfer::begin_post() {
  std::lock_guard lock(mutex_);
  if (cancelled_ || failed_ || ended_) return false;
  ++in_flight_;
  return true;
}

void Transfer::abandon_post() {
  std::unique_lock lock(mutex_);
  --in_flight_;
  end_if_due(lock);
}

void Transfer::finish_post(uint64_t units, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  --in_flight_;
  done_ += units;
  bytes_ += bytes;
  end_if_due(lock);
}

void Transfer::seal() {
  std::unique_lock lock(mutex_);
  sealed_ = true;
  end_if_due(lock);
}

void Transfer::cancel() {
  std::unique_lock lock(mutex_);
  cancelled_ = true;
  end_if_due(lock);
}

void Transfer::fail(const std::string& error) {
  std::unique_lock lock(mutex_);
  if (!failed_) {
    failed_ = true;
    error_ = error;
  }
  end_if_due(lock);
}

bool Transfer::postable() const {
  std::lock_guard lock(mutex_);
  return !(cancelled_ || failed_ || ended_);
}

// Emits the one TransferEnded. While a write flies nothing ends: its source pages are still read
// and its destination pages still written.
void Transfer::end_if_due(std::unique_lock<std::mutex>& lock) {
  if (ended_ || in_flight_ != 0) return;
  const bool completed = !failed_ && !cancelled_ && sealed_ && done_ == planned_;
  if (!completed && !failed_ && !cancelled_) return;
  ended_ = true;
  Event event;
  event.kind = EventKind::kTransferEnded;
  event.id = id_;
  event.peer = peer_;
  event.first = static_cast<int64_t>(done_);
  event.second = static_cast<int64_t>(planned_);
  event.bytes = static_cast<int64_t>(bytes_);
  event.outcome = static_cast<int32_t>(completed ? TransferOutcome::kCompleted
                                       : failed_ ? TransferOutcome::kFailed
                                                 : TransferOutcome::kCancelled);
  event.text = error_;
  // Pushed under the lock: once another thread sees the transfer ended, its event is in the queue
  // ahead of whatever that thread pushes next (PeerLost comes after TransferEnded).
  events_->push(std::move(event));
  lock.unlock();
  table_->erase(id_);
}

TransferPtr TransferTable::open(int64_t peer, uint32_t slot, std::shared_ptr<PeerLanes> lanes) {
  std::lock_guard lock(mutex_);
  const int64_t id = next_id_++;
  auto transfer = std::make_shared<Transfer>(id, peer, slot, std::move(lanes), events_, this);
  live_.emplace(id, transfer);
  return transfer;
}

Result<TransferPtr> TransferTable::find(int64_t id) const {
  std::lock_guard lock(mutex_);
  if (auto it = live_.find(id); it != live_.end()) return it->second;
  if (id >= 1 && id < next_id_) return TransferPtr();
  return Status(Code::kInvalid, "no transfer " + std::to_string(id) + " was ever opened");
}

void TransferTable::erase(int64_t id) {
  TransferPtr last;  // destroyed after the lock is gone
  std::lock_guard lock(mutex_);
  if (auto it = live_.find(id); it != live_.end()) {
    last = std::move(it->second);
    live_.erase(it);
  }
}

std::vector<TransferPtr> TransferTable::all() const {
  std::lock_guard lock(mutex_);
  std::vector<TransferPtr> out;
  out.reserve(live_.size());
  for (const auto& [id, transfer] : live_) out.push_back(transfer);
  return out;
}

void TransferTable::fail_peer(int64_t peer, const std::string& error) {
  for (const TransferPtr& transfer : all()) {
    if (transfer->peer() == peer) transfer->fail(error);
  }
}

}  // namespace ffi_transport
