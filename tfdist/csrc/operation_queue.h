// The queue of a communicator's operations, and the clock that records the group's progress.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collective/operation.h"
#include "error.h"

namespace tfdist {

// Records when the group last made progress, as far as this rank knows.
class ProgressClock {
 public:
  using Clock = std::chrono::steady_clock;

  // Records that this rank has made progress. Only the thread that runs this rank's operations
  // calls this function. To be fast, it only counts and does not read the clock.
  void Note() {
    count_.store(count_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  // Returns the number of calls of `Note`, modulo 2^32. This rank sends the number to the other
  // ranks, which notice its progress when the number changes.
  uint32_t count() const { return count_.load(std::memory_order_relaxed); }

  // Records that another rank has made progress. May be called from any thread.
  void NoteOther() { last_ = Clock::now().time_since_epoch().count(); }

  // Returns the time of the last known progress of any rank. If `Note` has been called since the
  // last call of this function, the current time is returned. May be called from any thread.
  Clock::time_point Last() {
    const uint32_t now = count();
    if (now != seen_) {
      NoteOther();
      // `seen_` must be stored after `last_`. Otherwise, a concurrent call could see the new count,
      // and return the old time.
      seen_ = now;
    }
    return Clock::time_point(Clock::duration(last_));
  }

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> seen_{0};
  std::atomic<Clock::rep> last_{0};
};

// Runs a communicator's operations one at a time. An operation runs either in the thread that calls
// `Run` or in the queue's own thread.
class OperationQueue {
 public:
  // A function that is called when an operation has ended. Its argument is null if the operation
  // succeeded, and otherwise the error. The queue's own thread calls the function, except that
  // `Enqueue` calls it if the queue has already been closed. The function must not throw, and must
  // not wait for the queue.
  using Done = std::function<void(const Error*)>;

  // Args:
  //   name: the communicator's name, which appears in error messages.
  //   execute: a function that runs one operation, and throws Error if the operation fails.
  OperationQueue(std::string name, std::function<void(Operation&)> execute);

  void Start();
  // Runs an operation after all earlier ones, and returns when it has ended. If no other operation
  // is pending, the calling thread runs it; otherwise, the queue's thread does. Throws Error if the
  // operation fails.
  void Run(Operation operation);
  // Queues an operation for the queue's own thread, and returns immediately. `done` is called when
  // the operation has ended, and may destroy the buffers of `operation`.
  void Enqueue(Operation operation, Done done);
  // Closes the queue: refuses new operations, and waits until the pending operations have ended.
  // Returns false if the queue has already been closed.
  bool Close();

  // Returns descriptions of the queued operations, which wait until the running operation ends.
  std::vector<std::string> Waiting();

 private:
  struct Task {
    Operation operation;
    Done done;
  };

  void Work();
  void Release();
  void RefuseOwnThread() const;
  Error Closed() const;

  const std::string name_;
  const std::function<void(Operation&)> execute_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;  // whether a thread is running an operation
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace tfdist
