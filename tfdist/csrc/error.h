// The errors of the core, and the two ways to end a wait early: guards and cancellations.
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
  kInvalidArgument = 1,  // the caller made a mistake; nothing has been sent
  kMismatch = 2,         // the ranks did not call the same collective
  kUnavailable = 3,      // a rank was lost, or the communicator was aborted
  kClosed = 4,           // this process has closed the communicator
  kInternal = 5,
  // The caller canceled the operation. Other ranks never receive this code.
  kCancelled = 6,
};

// The event that caused an error, such as the loss of a rank. Programs read the event, while people
// read the error message.
enum class Event : uint8_t {
  // None of the events below. Examples are a mismatch, an expired deadline, an abort by the
  // program, and a failure of this rank.
  kOther = 0,
  kLost = 1,    // a rank's process has ended, or a connection to it has broken
  kSilent = 2,  // a rank has shown no sign of life for too long
  kLeft = 3,    // a rank has closed the communicator
  // A rank has reported that its step failed, or that its process is ending because of an error.
  kFailed = 4,
};
constexpr int kEvents = 5;

// Returns the name of an event: "other", "lost", "silent", "left" or "failed".
inline const char* NameOf(Event event) {
  static const char* const names[kEvents] = {"other", "lost", "silent", "left", "failed"};
  return names[static_cast<size_t>(event)];
}

// The maximum length of an error message that ranks send to each other. The limit is the same for
// control frames and for shared memory, so that the message is the same on all ranks.
constexpr size_t kMaxMessageBytes = 1015;
// The maximum length of a worker's name in an error that ranks send to each other.
constexpr size_t kMaxNameBytes = 511;

class Error : public std::runtime_error {
 public:
  // Args: worker: the name of the worker to which the event happened, or "" if there is none.
  Error(Code code, const std::string& message, Event event = Event::kOther, std::string worker = "")
      : std::runtime_error(message), code_(code), event_(event), worker_(std::move(worker)) {}
  // Copies the text of the message. A copied std::runtime_error would share the text with the
  // original, but another thread may replace the original at the same time. ThreadSanitizer would
  // then report a data race, because it does not see how the standard library counts references to
  // the text.
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

// Returns the message of an error without its final period, for use in the middle of a sentence.
inline std::string ClauseOf(const Error& error) {
  std::string text = error.what();
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text.empty() ? "the reason is unknown" : text;
}

// An object that can end a wait early. The waiting thread calls `Check` periodically, and `Check`
// throws an exception if the wait must end.
class Guard {
 public:
  virtual ~Guard() = default;
  // Throws Error if the wait cannot succeed, for example because the group was aborted, a rank was
  // lost, or the operation timed out.
  virtual void Check() = 0;
  // Records that this rank has made progress: it has moved bytes, or it begins another wait.
  // Timeouts are measured from the last progress.
  virtual void NoteProgress() {}
};

// The request of a caller that an operation end soon.
class Cancellation {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  // Requests that the operation end. May be called from any thread.
  void Ask() {
    Rep none = 0;
    asked_.compare_exchange_strong(none, Clock::now().time_since_epoch().count());
  }

  bool asked() const { return asked_ != 0; }

  // Returns whether a canceled operation must end at the time `now`. It must end when `patience`
  // has passed both since the request and since `progress`, the time of the group's last progress.
  // Until then, an operation that all ranks have joined can still complete. This matters at the end
  // of the data, when TensorFlow cancels pending operations of a loop.
  bool Overdue(Clock::time_point now, Clock::time_point progress, Seconds patience) const {
    const Clock::time_point asked{Clock::duration(asked_)};
    return this->asked() && now - std::max(asked, progress) > patience;
  }

 private:
  using Rep = Clock::duration::rep;

  std::atomic<Rep> asked_{0};  // the time of the request; 0 if there is none
};

}  // namespace tfdist
