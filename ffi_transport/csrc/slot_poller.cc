#include "slot_poller.h"

#include <algorithm>
#include <string>
#include <utility>

#include "threads.h"

namespace ffi_transport {
namespace {

// Rounds that found nothing before each further one offers its CPU to others. Where every thread
// has a CPU the offer costs a fraction of a microsecond; where not, the program that is waited for
// may need this one.
constexpr int kBusyRounds = 64;

void relax(int rounds) {
  if (rounds >= kBusyRounds) {
    std::this_thread::yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

SlotPoller::SlotPoller(std::shared_ptr<SlotBoard> board, TriggerHub* hub, Stats* stats)
    : board_(std::move(board)), hub_(hub), stats_(stats), inbox_(&waiter_) {
  thread_ = std::thread([this] { loop(); });
  name_thread(thread_, "slots");
}

SlotPoller::~SlotPoller() { stop(); }

void SlotPoller::stop() {
  if (!thread_.joinable()) return;
  inbox_.close();
  stopping_.store(true, std::memory_order_seq_cst);
  waiter_.wake();
  thread_.join();
}

Status SlotPoller::check(const std::vector<int>& ordinals, int layers) const {
  if (layers > board_->layers()) {
    return Status(Code::kInvalid, "layers: " + std::to_string(layers) + ", slots were opened for " +
                                      std::to_string(board_->layers()));
  }
  for (const int ordinal : ordinals) {
    if (board_->place(ordinal) < 0) {
      return Status(Code::kInvalid,
                    "ordinals: no slots were opened for ordinal " + std::to_string(ordinal));
    }
  }
  return {};
}

void SlotPoller::watch(int64_t step, const std::vector<int>& ordinals, int layers) {
  Watch watch;
  watch.step = static_cast<uint32_t>(step);
  watch.layers = layers;
  for (const int ordinal : ordinals) {
    watch.devices.push_back({board_->place(ordinal), 0});
    board_->prepare(watch.devices.back().place, layers, watch.step);
  }
  // False when the engine is being closed: nobody waits for the step any more.
  inbox_.post([this, watch = std::move(watch)] { watches_.push_back(watch); });
}

void SlotPoller::forget(int64_t step) {
  // Waited for: a later step's value in a slot must not be taken for this one's.
  inbox_.call([this, low = static_cast<uint32_t>(step)] {
    std::erase_if(watches_, [low](const Watch& watch) { return watch.step == low; });
  });
}

bool SlotPoller::done(const Watch& watch) {
  return std::ranges::all_of(watch.devices,
                             [&](const Device& device) { return device.next == watch.layers; });
}

// From the last layer down, because one that is seen vouches for those before it: the call of layer
// l + 1 takes the x that the call of layer l returned, so they come in this order (M8). Thus values
// that were overwritten, or a copy that was late, hold nothing back.
bool SlotPoller::poll(Watch* watch) {
  bool progress = false;
  for (Device& device : watch->devices) {
    int end = watch->layers;
    while (end > device.next &&
           !SlotBoard::reached(board_->load(device.place, end - 1), watch->step)) {
      --end;
    }
    for (; device.next < end; ++device.next) {
      const int32_t value = board_->load(device.place, device.next);
      const bool offered = hub_->offer(watch->step, board_->ordinals()[device.place], device.next,
                                       board_->address(device.place, device.next));
      if (!offered) break;  // the ring is full: in the next round
      if (static_cast<uint32_t>(value) != watch->step) bump(stats_->slot_values_skipped);
      progress = true;
    }
  }
  return progress;
}

bool SlotPoller::report_refusal() {
  SlotBoard::Refusal refusal;
  if (!board_->take_refusal(&refusal)) return false;
  if (!hub_->offer_refusal(refusal.ordinal, refusal.layer, refusal.error)) {
    board_->note_refusal(board_->place(refusal.ordinal), refusal.layer, refusal.error);
  }
  return true;
}

void SlotPoller::loop() {
  int idle_rounds = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    bool progress = inbox_.run();
    if (watches_.empty()) {
      waiter_.announce();
      if (!inbox_.empty() || stopping_.load(std::memory_order_seq_cst)) {
        waiter_.retract();
        continue;
      }
      bump(stats_->thread_blocks);
      waiter_.block(-1);
      continue;
    }
    for (Watch& watch : watches_) progress |= poll(&watch);
    std::erase_if(watches_, &SlotPoller::done);
    progress |= report_refusal();
    idle_rounds = progress ? 0 : idle_rounds + 1;
    if (!progress) relax(idle_rounds);
  }
  inbox_.run();
}

}  // namespace ffi_transport
