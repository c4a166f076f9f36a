#include "data_link.h"

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
      window_(options.bytes_in_flight, options.posts_in_flight),
      ops_(options.posts_in_flight) {
  for (WriteOp& op : ops_) free_.push_back(&op);
}

void DataWorker::Link::drop_front(bool skipped) {
  if (skipped) bump(stats->plan_writes_skipped);
  jobs.pop_front();
  has_head_ = false;
  refused = false;  // what the provider refused is gone
}

uint64_t DataWorker::Link::next_bytes() {
  if (addresses.empty()) return 0;
  while (!jobs.empty()) {
    Job& job = jobs.front();
    if (!has_head_) {
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
    // The window is one peer's. A device group shares it out among its own domains alone: those of
    // other groups carry nothing of this job, and a share of theirs would leave it starving.
    return window_.admits(head_.bytes, job.source->domains.size()) ? head_.bytes : 0;
  }
  return 0;
}

bool DataWorker::Link::post_next() {
  Job& job = jobs.front();
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
  std::array<RemotePiece, kMaxPieces> remote;
  const Registration& registration = *job.source->domains[job.source_place].registration;
  const RemoteRegion::Access& access = job.remote->domains[job.remote_place];
  for (size_t i = 0; i < head_.piece_count; ++i) {
    const PackedWrite::Piece& piece = head_.pieces[i];
    local[i] = {reinterpret_cast<const void*>(job.source->address + piece.source), piece.length,
                registration.descriptor()};
    remote[i] = {access.base + piece.destination, piece.length, access.key};
  }
  WriteOp& op = *free_.back();
  op.transfer = job.transfer;
  op.source = job.source;
  op.units = head_.weight;
  op.bytes = head_.bytes;
  op.step = job.step;
  op.layer = job.layer;
  op.ordinal = job.ordinal;
  op.busy = true;
  const Status status =
      endpoint->write(addresses[access.domain], std::span(local.data(), head_.piece_count),
                      std::span(remote.data(), head_.piece_count),
                      counters->codec().encode(job.transfer->slot(), head_.weight), &op.context);
  if (!status.ok()) {
    op.busy = false;
    op.transfer = nullptr;
    op.source = nullptr;
    job.source->end();
    refused = true;
    if (status.code() == Code::kAgain) {
      bump(stats->posts_deferred);
    } else {
      job.transfer->fail(status.text());
      broken = status.text();
    }
    job.transfer->abandon_post();
    return false;
  }
  refused = false;
  has_head_ = false;
  free_.pop_back();
  window_.take(op.bytes);
  bump(stats->writes_posted);
  bump(stats->units_posted, op.units);
  bump(stats->bytes_posted, op.bytes);
  bump_own(domain_stats->units_posted, op.units);
  bump_own(domain_stats->bytes_posted, op.bytes);
  trace_write(TraceKind::kPost, op);
  return true;
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
  op.source = nullptr;
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
  for (Job& job : jobs) job.transfer->fail(reason);
  jobs.clear();
}

}  // namespace ffi_transport
