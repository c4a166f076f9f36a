#include "staging_ring.h"

#include <chrono>
#include <string>
#include <thread>

#include "staged_queue.h"
#include "waiter.h"

namespace ffi_transport {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);

}  // namespace

Result<std::unique_ptr<StagingRing>> StagingRing::open(std::shared_ptr<CudaDevice> device,
                                                       Domain& domain, uint64_t bytes) {
  if (bytes < kMinBytes) {
    return Status(Code::kInvalid, "staging_bytes: " + std::to_string(bytes) +
                                      " for each domain, at least " + std::to_string(kMinBytes) +
                                      " are needed");
  }
  std::unique_ptr<StagingRing> ring(new StagingRing(std::move(device), bytes));
  const std::string name = "CUDA device " + std::to_string(ring->device());
  const CudaDriver& cuda = ring->cuda();
  const CudaCurrent current(*ring->device_);
  if (!current.status().ok()) return current.status();
  void* memory = nullptr;
  Status status = cuda.check(cuda.mem_host_alloc(&memory, bytes, cuda::kHostAllocPortable),
                             name + ": " + std::to_string(bytes) +
                                 " bytes of pinned memory (staging_bytes) cannot be had");
  if (!status.ok()) return status;
  ring->memory_ = static_cast<char*>(memory);
  status = cuda.check(cuda.stream_create(&ring->stream_, cuda::kStreamNonBlocking),
                      name + ": a stream for copies cannot be had");
  if (!status.ok()) return status;
  auto registration = domain.register_memory(memory, bytes);
  if (!registration.ok()) return registration.status();
  ring->registration_ = registration.take();
  return ring;
}

StagingRing::~StagingRing() {
  const auto deadline = Clock::now() + kPatience;
  while (copying() && Clock::now() < deadline) {
    if (!sweep()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  // A copy may still write there: memory that is lost is better than memory that is someone else's.
  if (copying()) {
    [[maybe_unused]] Registration* kept = registration_.release();
    return;
  }
  registration_.reset();
  const CudaCurrent current(*device_);
  for (const cuda::Event event : idle_events_) cuda().event_destroy(event);
  if (stream_ != nullptr) cuda().stream_destroy(stream_);
  if (memory_ != nullptr) cuda().mem_free_host(memory_);
}

Status StagingRing::begin(const Region& source, const PackedWrite& write, StagedCopy* copy) {
  const CudaCurrent current(*device_);
  Status status = current.status();
  cuda::Event event = nullptr;
  if (status.ok() && !idle_events_.empty()) {
    event = idle_events_.back();
    idle_events_.pop_back();
  } else if (status.ok()) {
    status = cuda().check(cuda().event_create(&event, cuda::kEventDisableTiming), "cuEventCreate");
  }
  if (!status.ok()) return status;
  size_t copied = 0;
  char* to = memory_ + copy->offset;
  for (; copied < write.piece_count && status.ok(); ++copied) {
    const PackedWrite::Piece& piece = write.pieces[copied];
    status = cuda().check(
        cuda().memcpy_dtoh_async(to, source.address + piece.source, piece.length, stream_),
        "copying from CUDA device " + std::to_string(device()));
    to += piece.length;
  }
  // Also behind the part of a copy that failed. Where not even that can be recorded the context is
  // dead, and nothing of it runs any more.
  const Status recorded = cuda().check(cuda().event_record(event, stream_), "cuEventRecord");
  if (!recorded.ok()) {
    idle_events_.push_back(event);
    return status.ok() ? recorded : status;
  }
  copy->event = event;
  ++running_;
  return status;
}

Status StagingRing::end(StagedCopy* copy) {
  if (copy->event == nullptr) return {};
  const cuda::Error error = cuda().event_query(copy->event);
  if (error == cuda::kNotReady) return Status::Again();
  idle_events_.push_back(copy->event);
  copy->event = nullptr;
  --running_;
  return cuda().check(error, "copying from CUDA device " + std::to_string(device()));
}

void StagingRing::abandon(int64_t owner, StagedCopy copy, RegionPtr source) {
  abandoned_.push_back({owner, copy, std::move(source)});
  sweep();
}

bool StagingRing::sweep() {
  bool progress = false;
  // In the order of the stream, in which they end.
  while (!abandoned_.empty()) {
    Abandoned& oldest = abandoned_.front();
    if (end(&oldest.copy).code() == Code::kAgain) break;
    space_.give_back(oldest.owner, oldest.copy.offset, oldest.copy.bytes);
    if (oldest.source) oldest.source->end_copy();
    abandoned_.pop_front();
    progress = true;
  }
  return progress;
}

bool StagingRing::work() {
  bool progress = sweep();
  for (StagedQueue* queue : queues_) progress |= queue->poll();
  progress |= turns_.round(queues_);
  return progress;
}

}  // namespace ffi_transport
