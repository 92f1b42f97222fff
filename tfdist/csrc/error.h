// Errors of the core, and the requests to stop that waits check.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>

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

// The maximum length of a message between ranks; the same on all paths, so that all ranks raise the
// same message.
constexpr size_t kLongestMessage = 1015;

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

// Returns an error's message for use in the middle of a sentence.
inline std::string ClauseOf(const Error& error) {
  std::string text = error.what();
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text.empty() ? "the reason is unknown" : text;
}

// Ends a wait early.
//
// The waiting thread checks it periodically.
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

  // Requests the end; from any thread.
  void Ask() {
    Rep none = 0;
    asked_.compare_exchange_strong(none, Clock::now().time_since_epoch().count());
  }

  bool asked() const { return asked_ != 0; }

  // Whether the grace period has expired at a given time. It counts from the request, or from the
  // group's last progress if later. Meanwhile, operations that all ranks have joined complete: at
  // the end of the data, TensorFlow cancels a loop's pending operations.
  bool Overdue(Clock::time_point now, Clock::time_point progress, Seconds patience) const {
    const Clock::time_point asked{Clock::duration(asked_)};
    return this->asked() && now - std::max(asked, progress) > patience;
  }

 private:
  using Rep = Clock::duration::rep;

  std::atomic<Rep> asked_{0};  // time of the request, or zero
};

}  // namespace tfdist
