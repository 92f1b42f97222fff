// Errors of the core, and the requests to stop that waits check.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace tfdist {

// Kinds of errors in a collective.
enum class Code : int {
  kInvalidArgument = 1,  // the caller's mistake, found before anything was sent
  kMismatch = 2,         // the ranks did not call the same collective
  kUnavailable = 3,      // a rank was lost, or the communicator was aborted
  kClosed = 4,           // the communicator has been closed here
  kInternal = 5,
  kCancelled = 6,  // the caller canceled the operation; never sent to other ranks
};

// What happened to a group or one of its ranks. Programs read this; messages are for people.
enum class Event : uint8_t {
  kOther = 0,   // a mismatch, a deadline, an abort by the program, a failure of this rank
  kLost = 1,    // a rank's process has ended, or a connection to it has broken
  kSilent = 2,  // a rank has shown no sign of life for too long
  kLeft = 3,    // a rank has closed the communicator
  kFailed = 4,  // a rank has reported that its step failed, or that its process ends with an error
};
constexpr int kEvents = 5;

// Returns an event's name: "other", "lost", "silent", "left" or "failed".
inline const char* NameOf(Event event) {
  static const char* const names[kEvents] = {"other", "lost", "silent", "left", "failed"};
  return names[static_cast<size_t>(event)];
}

// The maximum length of a message between ranks; the same on all paths, so that all ranks raise the
// same message.
constexpr size_t kMaxMessageBytes = 1015;
// The same for the name of a worker.
constexpr size_t kMaxNameBytes = 511;

class Error : public std::runtime_error {
 public:
  // Args: worker: the worker to which the event happened, as named in messages; "" for none.
  Error(Code code, const std::string& message, Event event = Event::kOther, std::string worker = "")
      : std::runtime_error(message), code_(code), event_(event), worker_(std::move(worker)) {}
  // A copy does not share the text: another thread may replace the original, and ThreadSanitizer
  // does not see how the standard library counts the references to a shared text.
  Error(const Error& other) : Error(other.code_, other.what(), other.event_, other.worker_) {}
  Error& operator=(const Error&) = default;
  Code code() const { return code_; }
  Event event() const { return event_; }
  const std::string& worker() const { return worker_; }

 private:
  Code code_;
  Event event_;
  std::string worker_;
};

// Returns an error's message for use in the middle of a sentence.
inline std::string ClauseOf(const Error& error) {
  std::string text = error.what();
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text.empty() ? "the reason is unknown" : text;
}

// Ends a wait early: the waiting thread calls `Check` periodically.
class Guard {
 public:
  virtual ~Guard() = default;
  // Throws Error if the wait cannot succeed: aborted, a rank lost, or timed out.
  virtual void Check() = 0;
  // Records progress of this rank: it moved bytes, or begins another wait. Timeouts count from
  // then.
  virtual void NoteProgress() {}
};

// A caller's request to end an operation soon.
class Cancellation {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  // Requests the end; may be called from any thread.
  void Ask() {
    Rep none = 0;
    asked_.compare_exchange_strong(none, Clock::now().time_since_epoch().count());
  }

  bool asked() const { return asked_ != 0; }

  // Whether the grace period has expired at a given time. It counts from the request, or from the
  // group's last progress if later. Operations that all ranks have joined can complete within this
  // period. This matters at the end of the data, when TensorFlow cancels a loop's pending
  // operations.
  bool Overdue(Clock::time_point now, Clock::time_point progress, Seconds patience) const {
    const Clock::time_point asked{Clock::duration(asked_)};
    return this->asked() && now - std::max(asked, progress) > patience;
  }

 private:
  using Rep = Clock::duration::rep;

  std::atomic<Rep> asked_{0};  // time of the request, or zero
};

}  // namespace tfdist
