// Status and Result: how errors travel in the engine. Nothing here throws, because an error must be
// able to cross threads and end as an event or as a Python exception in the thread that asked.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace ffi_transport {

enum class Code : uint8_t {
  kOk,
  kAgain,         // not now: the provider's queue is full; ask again after polling
  kInvalid,       // the caller's fault: a bad argument
  kUnavailable,   // no libfabric, no such provider, port in use
  kPeerLost,      // the peer is gone, or was never there
  kTimeout,       // a deadline passed
  kRegistration,  // a memory region could not be registered, or is still in use
  kProtocol,      // the peer or the caller broke the protocol
  kClosed,        // the engine is closed
};

// Cheap when ok: no allocation, two words.
class [[nodiscard]] Status {
 public:
  struct Detail {
    std::string text;
    int64_t peer = -1;
    int64_t id = -1;
    double elapsed_s = -1;
    std::string missing;
  };

  Status() = default;
  Status(Code code, std::string text)
      : code_(code), detail_(std::make_shared<Detail>(Detail{std::move(text), -1, -1, -1, {}})) {}
  Status(Code code, Detail detail)
      : code_(code), detail_(std::make_shared<Detail>(std::move(detail))) {}

  static Status Again() {
    Status status;
    status.code_ = Code::kAgain;
    return status;
  }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  std::string text() const { return detail_ ? detail_->text : std::string(); }
  Detail detail() const { return detail_ ? *detail_ : Detail{}; }

 private:
  Code code_ = Code::kOk;
  std::shared_ptr<const Detail> detail_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit by design
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& operator*() { return *value_; }
  T* operator->() { return &*value_; }
  T take() { return std::move(*value_); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace ffi_transport
