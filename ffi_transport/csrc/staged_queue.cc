#include "staged_queue.h"

namespace ffi_transport {

StagedQueue::StagedQueue(int64_t peer, StagingRing* ring, const DomainLimits* limits,
                         uint64_t ahead, Stats* stats)
    : peer_(peer), ring_(ring), limits_(limits), ahead_(ahead), stats_(stats) {
  ring_->add(this);
}

StagedQueue::~StagedQueue() { ring_->remove(this); }

void StagedQueue::drop_job(bool skipped) {
  if (skipped) bump(stats_->plan_writes_skipped);
  if (has_room_) ring_->space().give_back(peer_, room_, head_.bytes);
  ring_->space().leave(peer_);
  jobs_.pop_front();
  has_head_ = has_room_ = waits_ = false;
}

uint64_t StagedQueue::next_bytes() {
  while (!jobs_.empty()) {
    Job& job = jobs_.front();
    if (!has_head_) {
      if (job.cursor == job.end || !job.transfer->postable()) {
        drop_job(job.cursor != job.end);
        continue;
      }
      const uint64_t max_write = std::min<uint64_t>(limits_->max_write, ring_->max_write());
      head_ = pack_next(job.units, &job.cursor, job.end, limits_->pieces, max_write);
      if (head_.bytes > limits_->max_write) {
        job.transfer->fail("a unit of " + std::to_string(head_.bytes) +
                           " bytes exceeds the provider's writes of " +
                           std::to_string(limits_->max_write));
        continue;  // no longer postable: dropped in the next turn
      }
      has_head_ = true;
    } else if (!job.transfer->postable()) {
      drop_job(true);
      continue;
    }
    if (!has_room_) {
      StagingSpace& space = ring_->space();
      const uint64_t held = space.held(peer_);
      if (held > 0 && held + head_.bytes > ahead_) return 0;
      const auto offset = space.take(peer_, head_.bytes);
      if (!offset) {
        if (!waits_) bump(stats_->staging_waits);
        waits_ = true;
        return 0;
      }
      room_ = *offset;
      has_room_ = true;
      waits_ = false;
    }
    return head_.bytes;
  }
  return 0;
}

bool StagedQueue::post_next() {
  Job& job = jobs_.front();
  if (!job.transfer->begin_post()) {  // cancelled or failed since it was packed
    drop_job(true);
    return true;
  }
  if (!job.source->begin_copy()) {
    job.transfer->fail("source region " + std::to_string(job.source->id) + " was deregistered");
    job.transfer->abandon_post();
    drop_job(true);
    return true;
  }
  StagedCopy copy{room_, head_.bytes, nullptr};
  const Status status = ring_->begin(*job.source, head_, &copy);
  has_head_ = has_room_ = false;
  if (!status.ok()) {
    bump(stats_->staging_failures);
    ring_->abandon(peer_, copy, job.source);
    job.transfer->fail(status.text());
    job.transfer->abandon_post();
    drop_job(true);
    return true;
  }
  bump(stats_->staged_writes);
  bump(stats_->staged_bytes, head_.bytes);
  StagedWrite write;
  write.transfer = job.transfer;
  write.source = job.source;
  write.remote = job.remote;
  write.remote_place = job.remote_place;
  write.domains = job.source->domains.size();
  write.packed = head_;
  write.copy = copy;
  write.step = job.step;
  write.layer = job.layer;
  write.ordinal = job.ordinal;
  writes_.push_back(std::move(write));
  return true;
}

bool StagedQueue::poll() {
  bool progress = false;
  // One stream copies for all, so they end in their order.
  for (; copied_ < writes_.size(); ++copied_) {
    StagedWrite& write = writes_[copied_];
    const Status status = ring_->end(&write.copy);
    if (status.code() == Code::kAgain) break;
    // The region is let go first: once its transfer has ended, the owner may deregister it.
    write.source->end_copy();
    write.source = nullptr;
    if (!status.ok()) {
      bump(stats_->staging_failures);
      write.transfer->fail(status.text());  // no longer postable: dropped when it is its turn
    }
    write.transfer->abandon_post();
    progress = true;
  }
  return progress;
}

uint64_t StagedQueue::ready_bytes() {
  while (copied_ > 0) {
    if (writes_.front().transfer->postable()) return writes_.front().packed.bytes;
    bump(stats_->plan_writes_skipped);
    drop_front();
  }
  return 0;
}

void StagedQueue::pop_front() {
  writes_.pop_front();
  --copied_;
}

void StagedQueue::drop_front() {
  const StagedCopy& copy = writes_.front().copy;
  ring_->space().give_back(peer_, copy.offset, copy.bytes);
  pop_front();
}

void StagedQueue::close(const std::string& reason) {
  while (copied_ > 0) {
    writes_.front().transfer->fail(reason);
    drop_front();
  }
  for (StagedWrite& write : writes_) {
    ring_->abandon(peer_, write.copy, std::move(write.source));
    write.transfer->fail(reason);
    write.transfer->abandon_post();
  }
  writes_.clear();
  for (const Job& job : jobs_) job.transfer->fail(reason);
  while (!jobs_.empty()) drop_job(false);
}

}  // namespace ffi_transport
