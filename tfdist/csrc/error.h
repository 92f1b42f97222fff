// Errors of the core, and the requests to stop that waits check.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace tfdist {

// What goes wrong in a collective.
enum class Code : int {
  kInvalidArgument = 1,  // the caller's mistake, found before anything was sent
  kMismatch = 2,         // the ranks did not call the same collective
  kUnavailable = 3,      // a rank was lost, or the communicator was aborted
  kClosed = 4,           // the communicator has been closed here
  kInternal = 5,
  kCancelled = 6,  // the caller has asked for the end; never told to other ranks
};

// The longest message that ranks pass on to one another; the same for all ways, so that all raise
// the same.
constexpr size_t kLongestMessage = 1015;

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

// What an error says, for the middle of a sentence.
inline std::string ClauseOf(const Error& error) {
  std::string text = error.what();
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text.empty() ? "the reason is unknown" : text;
}

// What ends a wait early.
//
// Called again and again by whoever waits.
class Guard {
 public:
  virtual ~Guard() = default;
  // Throws Error when the wait is in vain: aborted, a rank lost, out of time.
  virtual void Check() = 0;
  // Notes that this rank has made progress: it has moved bytes, or begins another wait. Patience
  // counts from then.
  virtual void NoteProgress() {}
};

// The wish of whoever called an operation that it end soon.
class Cancellation {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  // Asks for the end, from any thread.
  void Ask() {
    Rep none = 0;
    asked_.compare_exchange_strong(none, Clock::now().time_since_epoch().count());
  }

  bool asked() const { return asked_ != 0; }

  // Whether patience has run out at a time: it counts from the request, or from the last progress
  // of the group if that is later. What all ranks have joined comes to its end meanwhile: at the
  // end of the data TensorFlow cancels what a loop has still under way.
  bool Overdue(Clock::time_point now, Clock::time_point progress, Seconds patience) const {
    const Clock::time_point asked{Clock::duration(asked_)};
    return this->asked() && now - std::max(asked, progress) > patience;
  }

 private:
  using Rep = Clock::duration::rep;

  std::atomic<Rep> asked_{0};  // when, or zero
};

}  // namespace tfdist
