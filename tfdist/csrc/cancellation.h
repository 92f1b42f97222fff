// The wish of whoever called an operation that it end soon.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace tfdist {

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

  // Whether patience has run out at a time: it counts from the request, or from the last progress of
  // the group if that is later. What all ranks have joined comes to its end meanwhile: at the end of
  // the data TensorFlow cancels what a loop has still under way.
  bool Overdue(Clock::time_point now, Clock::time_point progress, Seconds patience) const {
    const Clock::time_point asked{Clock::duration(asked_)};
    return this->asked() && now - std::max(asked, progress) > patience;
  }

 private:
  using Rep = Clock::duration::rep;

  std::atomic<Rep> asked_{0};  // when, or zero
};

}  // namespace tfdist
