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
  // calls this function. It does not read the clock, so that it is fast.
  void Note() {
    count_.store(count_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  // Returns the number of calls of `Note`, modulo 2^32. This rank sends the number to the other
  // ranks.
  uint32_t count() const { return count_.load(std::memory_order_relaxed); }

  // Records that another rank has made progress. May be called from any thread.
  void NoteOther() { last_ = Clock::now().time_since_epoch().count(); }

  // Returns the time of the last known progress of any rank. If this rank has made progress since
  // the last call of this function, that progress counts as made now. May be called from any
  // thread.
  Clock::time_point Last() {
    const uint32_t now = count();
    if (now != seen_) {
      NoteOther();
      // This store is the last one, so that no other thread can combine the new count with the old
      // time.
      seen_ = now;
    }
    return Clock::time_point(Clock::duration(last_));
  }

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> seen_{0};
  std::atomic<Clock::rep> last_{0};
};

// Runs a communicator's operations one at a time, in the thread that calls `Run` or in the queue's
// own thread.
class OperationQueue {
 public:
  // Receives null if the operation succeeded, and the error otherwise. The queue's thread calls
  // this function. If the queue has been closed, `Enqueue` calls it. The function must not throw,
  // and must not wait for the queue.
  using Done = std::function<void(const Error*)>;

  // Args: name: the communicator's name, for messages; execute: a function that runs one operation,
  // and throws Error if the operation fails.
  OperationQueue(std::string name, std::function<void(Operation&)> execute);

  void Start();
  // Runs an operation after all earlier ones, and returns when it has ended. If no other operation
  // is pending, the calling thread runs it; otherwise the queue's thread does. Throws Error.
  void Run(Operation operation);
  // Queues an operation for the queue's own thread, and returns immediately. `done` may destroy the
  // buffers of `operation`.
  void Enqueue(Operation operation, Done done);
  // Refuses new operations, and waits until the pending ones have ended. Returns false if the queue
  // has already been closed.
  bool Close();

  // Returns descriptions of the operations that wait for the running operation to end.
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
