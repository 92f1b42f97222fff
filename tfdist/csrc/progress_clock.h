// When the ranks of a group last made progress, as far as this one knows.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tfdist {

class ProgressClock {
 public:
  using Clock = std::chrono::steady_clock;

  // Notes progress of this rank; by the thread that runs its operations. Reads no clock.
  void Note() {
    count_.store(count_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  // A number that changes with each progress of this rank; the other ranks are told of it.
  uint32_t count() const { return count_.load(std::memory_order_relaxed); }

  // Notes progress of another rank; from any thread.
  void NoteOther() { last_ = Clock::now().time_since_epoch().count(); }

  // When this rank or another one was last seen to make progress; from any thread. What this rank
  // has noted since the last call counts from now.
  Clock::time_point Last() {
    const uint32_t now = count();
    if (now != seen_) {
      NoteOther();
      seen_ = now;  // last, so that no other thread takes the old time for the new one's
    }
    return Clock::time_point(Clock::duration(last_));
  }

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> seen_{0};
  std::atomic<Clock::rep> last_{0};
};

}  // namespace tfdist
