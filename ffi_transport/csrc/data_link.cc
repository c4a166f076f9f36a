#include "data_link.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace ffi_transport {

DataWorker::Link::Link(int64_t peer, std::unique_ptr<Endpoint> endpoint, const DomainLimits* limits,
                       const WorkerOptions& options, ImmCounters* counters, Stats* stats,
                       DomainStats* domain_stats, TraceLog* trace)
    : peer(peer),
      endpoint(std::move(endpoint)),
      limits(limits),
      counters(counters),
      stats(stats),
      domain_stats(domain_stats),
      trace(trace),
      staged_ahead_(std::max<uint64_t>(2 * options.bytes_in_flight, 4 * kMaxWriteBytes)),
      window_(options.bytes_in_flight, options.posts_in_flight),
      ops_(options.posts_in_flight) {
  for (WriteOp& op : ops_) free_.push_back(&op);
}

void DataWorker::Link::add(Job job, StagingRing* ring) {
  if (ring == nullptr) {
    jobs_.push_back(std::move(job));
    return;
  }
  auto queue = std::ranges::find_if(staged_, [&](const auto& q) { return &q->ring() == ring; });
  if (queue == staged_.end()) {
    staged_.push_back(std::make_unique<StagedQueue>(peer, ring, limits, staged_ahead_, stats));
    queue = std::prev(staged_.end());
  }
  (*queue)->push(std::move(job));
}

void DataWorker::Link::drop_front(bool skipped) {
  if (skipped) bump(stats->plan_writes_skipped);
  jobs_.pop_front();
  has_head_ = false;
}

uint64_t DataWorker::Link::next_bytes() {
  if (addresses.empty()) return 0;
  // One that the window does not admit keeps its turn: a large write would else wait for ever while
  // small ones of other sources keep the window from running empty.
  for (size_t tried = 0; tried <= staged_.size(); ++tried) {
    turn_ %= staged_.size() + 1;
    const uint64_t bytes = bytes_of(turn_);
    if (bytes == 0) {
      ++turn_;
      continue;
    }
    // The window is one peer's. A device group shares it out among its own domains alone: those of
    // other groups carry nothing of this job, and a share of theirs would leave it starving.
    const size_t domains =
        turn_ == 0 ? jobs_.front().source->domains.size() : staged_[turn_ - 1]->front().domains;
    return window_.admits(bytes, domains) ? bytes : 0;
  }
  refused = false;  // what the provider refused is gone
  return 0;
}

uint64_t DataWorker::Link::bytes_of(size_t source) {
  return source == 0 ? job_bytes() : staged_[source - 1]->ready_bytes();
}

uint64_t DataWorker::Link::job_bytes() {
  while (!jobs_.empty()) {
    Job& job = jobs_.front();
    if (has_head_) return head_.bytes;
    if (job.cursor == job.end) {
      drop_front(false);
      continue;
    }
    if (!job.transfer->postable()) {
      drop_front(true);
      continue;
    }
    head_ = pack_next(job.units, &job.cursor, job.end, limits->pieces, limits->max_write);
    if (head_.bytes > limits->max_write) {
      job.transfer->fail("a unit of " + std::to_string(head_.bytes) +
                         " bytes exceeds the provider's writes of " +
                         std::to_string(limits->max_write));
      continue;  // no longer postable: dropped in the next turn
    }
    has_head_ = true;
  }
  return 0;
}

bool DataWorker::Link::post_next() {
  return turn_ == 0 ? post_job() : post_staged(*staged_[turn_ - 1]);
}

bool DataWorker::Link::post_job() {
  Job& job = jobs_.front();
  if (!job.transfer->begin_post()) {  // cancelled or failed since it was packed
    drop_front(true);
    return true;
  }
  if (!job.source->begin()) {
    job.transfer->fail("source region " + std::to_string(job.source->id) + " was deregistered");
    job.transfer->abandon_post();
    drop_front(true);
    return true;
  }
  std::array<LocalPiece, kMaxPieces> local;
  const Registration& registration = *job.source->domains[job.source_place].registration;
  for (size_t i = 0; i < head_.piece_count; ++i) {
    const PackedWrite::Piece& piece = head_.pieces[i];
    local[i] = {reinterpret_cast<const void*>(job.source->address + piece.source), piece.length,
                registration.descriptor()};
  }
  WriteOp& op = *free_.back();
  op.transfer = job.transfer;
  op.source = job.source;
  op.step = job.step;
  op.layer = job.layer;
  op.ordinal = job.ordinal;
  const Status status = write(op, head_, std::span(local.data(), head_.piece_count),
                              job.remote->domains[job.remote_place]);
  if (!status.ok()) {
    job.source->end();
    job.transfer->abandon_post();
    return false;
  }
  has_head_ = false;
  ++turn_;
  return true;
}

bool DataWorker::Link::post_staged(StagedQueue& queue) {
  StagedWrite& staged = queue.front();
  if (!staged.transfer->begin_post()) {  // cancelled or failed since it was looked at
    bump(stats->plan_writes_skipped);
    queue.drop_front();
    return true;
  }
  WriteOp& op = *free_.back();
  op.transfer = staged.transfer;
  op.ring = &queue.ring();
  op.room = staged.copy.offset;
  op.step = staged.step;
  op.layer = staged.layer;
  op.ordinal = staged.ordinal;
  const LocalPiece local = queue.ring().piece(staged.copy);
  const Status status =
      write(op, staged.packed, std::span(&local, 1), staged.remote->domains[staged.remote_place]);
  if (!status.ok()) {
    staged.transfer->abandon_post();
    return false;
  }
  queue.pop_front();
  ++turn_;
  return true;
}

Status DataWorker::Link::write(WriteOp& op, const PackedWrite& packed,
                               std::span<const LocalPiece> local,
                               const RemoteRegion::Access& access) {
  std::array<RemotePiece, kMaxPieces> remote;
  for (size_t i = 0; i < packed.piece_count; ++i) {
    const PackedWrite::Piece& piece = packed.pieces[i];
    remote[i] = {access.base + piece.destination, piece.length, access.key};
  }
  op.units = packed.weight;
  op.bytes = packed.bytes;
  op.busy = true;
  const Status status =
      endpoint->write(addresses[access.domain], local, std::span(remote.data(), packed.piece_count),
                      counters->codec().encode(op.transfer->slot(), packed.weight), &op.context);
  if (!status.ok()) {
    refused = true;
    if (status.code() == Code::kAgain) {
      bump(stats->posts_deferred);
    } else {
      op.transfer->fail(status.text());
      broken = status.text();
    }
    op.busy = false;
    op.transfer = nullptr;
    op.source = nullptr;
    op.ring = nullptr;
    return status;
  }
  refused = false;
  free_.pop_back();
  window_.take(op.bytes);
  bump(stats->writes_posted);
  bump(stats->units_posted, op.units);
  bump(stats->bytes_posted, op.bytes);
  bump_own(domain_stats->units_posted, op.units);
  bump_own(domain_stats->bytes_posted, op.bytes);
  trace_write(TraceKind::kPost, op);
  return status;
}

bool DataWorker::Link::poll() {
  std::array<Completion, 64> completions;
  const int count = endpoint->poll(completions);
  if (count < 0) {
    broken = std::string("the completion queue failed: ") + std::strerror(-count);
    return true;
  }
  for (int i = 0; i < count; ++i) finish(completions[i]);
  return count > 0;
}

void DataWorker::Link::finish(const Completion& completion) {
  if (completion.kind == Completion::Kind::kImmediate && completion.error == 0) {
    uint32_t slot, weight;
    // Before the count that it may complete, so that who sees that sees this.
    if (counters->codec().decode(completion.immediate, &slot, &weight)) {
      bump_own(domain_stats->units_counted, weight);
    }
    counters->add(completion.immediate);
    return;
  }
  if (completion.context == nullptr) {
    // An error without an operation: of a connection that a peer opened to us and dropped. What
    // was counted has landed; a dead peer shows by its silence on the control channel.
    return;
  }
  WriteOp& op = *reinterpret_cast<WriteOp*>(completion.context);
  if (!op.busy) return;
  const TransferPtr transfer = op.transfer;
  const uint64_t units = op.units, bytes = op.bytes;
  if (completion.error != 0) {
    broken = std::string("a write failed: ") + std::strerror(completion.error);
    bump(stats->writes_failed);
    retire(op);
    transfer->fail(broken);
    transfer->finish_post(0, 0);
    return;
  }
  bump(stats->writes_completed);
  bump(stats->units_completed, units);
  bump(stats->bytes_completed, bytes);
  bump_own(domain_stats->units_completed, units);
  bump_own(domain_stats->bytes_completed, bytes);
  trace_write(TraceKind::kCompletion, op);
  // The region is let go first: once its transfer has ended, the owner may deregister it.
  retire(op);
  transfer->finish_post(units, bytes);
}

void DataWorker::Link::retire(WriteOp& op) {
  window_.give_back(op.bytes);
  if (op.source) op.source->end();
  if (op.ring != nullptr) op.ring->space().give_back(peer, op.room, op.bytes);
  op.source = nullptr;
  op.ring = nullptr;
  op.transfer = nullptr;
  op.busy = false;
  free_.push_back(&op);
}

void DataWorker::Link::trace_write(TraceKind kind, const WriteOp& op) {
  if (!trace->on()) return;
  TraceRecord record;
  record.kind = static_cast<int32_t>(kind);
  record.layer = op.layer;
  record.step = op.step;
  record.ordinal = op.ordinal;
  record.transfer = op.transfer->id();
  record.bytes = static_cast<int64_t>(op.bytes);
  trace->add(record);
}

void DataWorker::Link::close(const std::string& reason) {
  endpoint.reset();  // the fence: from here on no memory of ours is read or written through it
  for (WriteOp& op : ops_) {
    if (!op.busy) continue;
    bump(stats->writes_fenced);
    const TransferPtr transfer = op.transfer;
    retire(op);
    transfer->fail(reason);
    transfer->finish_post(0, 0);
  }
  for (Job& job : jobs_) job.transfer->fail(reason);
  jobs_.clear();
  for (auto& queue : staged_) queue->close(reason);
}

}  // namespace ffi_transport
