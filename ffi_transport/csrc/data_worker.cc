#include "data_worker.h"

#include <algorithm>
#include <array>

#include "data_link.h"
#include "threads.h"

namespace ffi_transport {
namespace {

// How long the thread sleeps while a copy from a device runs: nothing wakes it when the copy ends.
constexpr auto kCopyNap = std::chrono::microseconds(20);

}  // namespace

DataWorker::DataWorker(std::unique_ptr<Domain> domain, const WorkerOptions& options,
                       ImmCounters* counters, Stats* stats, std::atomic<uint64_t>* trace_order,
                       LinkBroken link_broken)
    : options_(options),
      counters_(counters),
      stats_(stats),
      link_broken_(std::move(link_broken)),
      trace_(trace_order, options.trace),
      inbox_(&waiter_),
      domain_(std::move(domain)) {}

DataWorker::~DataWorker() { stop(); }

Status DataWorker::start(const std::string& name, const std::vector<int>& cpus,
                         std::function<bool()> extra, std::function<bool()> extra_idle) {
  extra_ = std::move(extra);
  extra_idle_ = std::move(extra_idle);
  thread_ = std::thread([this] { loop(); });
  name_thread(thread_, name);
  return pin_thread(thread_, cpus);
}

void DataWorker::stop() {
  if (!thread_.joinable()) return;
  inbox_.close();
  stopping_.store(true, std::memory_order_seq_cst);
  waiter_.wake();
  thread_.join();
}

Result<std::string> DataWorker::open_link(int64_t peer) {
  Result<std::string> result(Status(Code::kClosed, "the engine is closed"));
  inbox_.call([&] {
    auto endpoint = domain_->open_endpoint(0);
    if (!endpoint.ok()) {
      result = endpoint.status();
      return;
    }
    result = (*endpoint)->name();
    links_.push_back(std::make_unique<Link>(peer, endpoint.take(), &domain_->limits(), options_,
                                            counters_, stats_, &domain_stats_, &trace_));
    waiter_.watch(links_.back()->endpoint->wait_fd());
  });
  return result;
}

Status DataWorker::connect_link(int64_t peer, const std::vector<std::string>& remote_names) {
  Status status(Code::kClosed, "the engine is closed");
  inbox_.call([&] {
    for (auto& link : links_) {
      if (link->peer != peer) continue;
      std::vector<PeerAddress> addresses;
      for (const std::string& name : remote_names) {
        auto address = link->endpoint->insert(name);
        status = address.status();
        if (!status.ok()) return;
        addresses.push_back(*address);
      }
      link->addresses = std::move(addresses);
      return;
    }
    status = Status(Code::kPeerLost, "peer " + std::to_string(peer) + " has no data endpoint");
  });
  return status;
}

void DataWorker::close_link(int64_t peer) {
  inbox_.call([&] { drop_link(peer); });
}

Status DataWorker::add_ring(std::unique_ptr<StagingRing> ring) {
  const bool added = inbox_.call([&] {
    const int device = ring->device();
    rings_.emplace(device, std::move(ring));
  });
  return added ? Status() : Status(Code::kClosed, "the engine is closed");
}

void DataWorker::submit(Job job) {
  // std::function wants a copyable closure; a job is cheap to share.
  auto shared = std::make_shared<Job>(std::move(job));
  if (!inbox_.post([this, shared] { submit_here(std::move(*shared)); })) {
    shared->transfer->fail("the engine is closed");
  }
}

void DataWorker::submit_here(Job job) {
  for (auto& link : links_) {
    if (link->peer == job.transfer->peer()) {
      StagingRing* ring = nullptr;
      if (job.source->mode == MemoryMode::kStaged) ring = rings_.at(job.source->device).get();
      link->add(std::move(job), ring);
      return;
    }
  }
  job.transfer->fail("the peer's data endpoint is closed");
}

void DataWorker::drop_link(int64_t peer) {
  const auto it = std::find_if(links_.begin(), links_.end(),
                               [&](const auto& link) { return link->peer == peer; });
  if (it == links_.end()) return;
  std::unique_ptr<Link> link = std::move(*it);
  links_.erase(it);
  waiter_.unwatch(link->endpoint->wait_fd());
  link->close("the peer's data endpoint was closed");
}

void DataWorker::break_link(int64_t peer, const std::string& reason) {
  // Which writes of a broken connection landed is unknown, and the next one would fail for no
  // fault of its own (seen with every TCP provider): so the link as a whole is fenced, at once.
  const auto it = std::find_if(links_.begin(), links_.end(),
                               [&](const auto& link) { return link->peer == peer; });
  if (it == links_.end()) return;
  std::unique_ptr<Link> link = std::move(*it);
  links_.erase(it);
  waiter_.unwatch(link->endpoint->wait_fd());
  link->close(reason);
  link_broken_(peer, reason);
}

bool DataWorker::idle() const {
  return inbox_.empty() && extra_idle_() && !stopping_.load(std::memory_order_seq_cst);
}

void DataWorker::loop() {
  int empty_turns = 0;
  auto active_until = Clock::now();
  const auto spin = std::chrono::microseconds(options_.spin_us);
  while (!stopping_.load(std::memory_order_relaxed)) {
    bool progress = inbox_.run();
    progress |= extra_();
    progress |= poll_links();
    progress |= work_rings();
    progress |= turns_.round(links_);
    if (progress) {
      active_until = Clock::now() + spin;
      empty_turns = 0;
      continue;
    }
    if (++empty_turns < kEmptyTurns || Clock::now() < active_until) continue;
    if (copying()) {
      std::this_thread::sleep_for(kCopyNap);
      continue;
    }
    waiter_.announce();
    bool may_block = idle();
    int wait_ms = -1;
    for (auto& link : links_) {
      may_block = may_block && link->endpoint->may_block();
      if (link->refused || link->endpoint->wait_fd() < 0) {
        wait_ms = 1;  // something is due that no descriptor announces
      }
    }
    if (!may_block) {
      waiter_.retract();
      continue;
    }
    bump(stats_->thread_blocks);
    waiter_.block(wait_ms);
  }
  inbox_.run();
  while (!links_.empty()) drop_link(links_.back()->peer);
  rings_.clear();
}

bool DataWorker::work_rings() {
  if (rings_.empty()) return false;
  bool progress = false;
  uint64_t bytes = 0;
  for (auto& [device, ring] : rings_) {
    progress |= ring->work();
    bytes += ring->space().used();
  }
  staged_bytes_.store(bytes, std::memory_order_relaxed);
  return progress;
}

bool DataWorker::copying() const {
  return std::ranges::any_of(rings_, [](const auto& entry) { return entry.second->copying(); });
}

bool DataWorker::poll_links() {
  bool progress = false;
  // A broken link leaves the list while we walk it.
  for (size_t i = 0; i < links_.size();) {
    Link& link = *links_[i];
    progress |= link.poll();
    if (link.broken.empty()) {
      ++i;
    } else {
      break_link(link.peer, std::string(link.broken));
    }
  }
  return progress;
}

}  // namespace ffi_transport
