// The wish of whoever called an operation that it end soon.
#pragma once

#include <atomic>
#include <chrono>

namespace tfdist {

class Cancellation {
 public:
  // Asks for the end, from any thread.
  void Ask() {
    Rep none = 0;
    asked_.compare_exchange_strong(none, Clock::now().time_since_epoch().count());
  }

  // Whether it was asked for long enough ago. What all ranks have joined comes to its end meanwhile:
  // at the end of the data TensorFlow cancels what a loop has still under way.
  bool Overdue() const {
    const Rep asked = asked_;
    return asked != 0 && Clock::now() - Clock::time_point(Clock::duration(asked)) > kPatience;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Rep = Clock::duration::rep;
  static constexpr auto kPatience = std::chrono::seconds(1);

  std::atomic<Rep> asked_{0};  // when, or zero
};

}  // namespace tfdist
