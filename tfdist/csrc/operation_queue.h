// The queue of operations of a communicator, and its progress.
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

// When the ranks of a group last made progress, as far as this one knows.
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

// Runs a communicator's operations one after the other: in the thread that asks, or in its own.
class OperationQueue {
 public:
  // Null, or what went wrong; called in the queue's thread. It must not throw, nor wait for the
  // queue.
  using Done = std::function<void(const Error*)>;

  // Args: the communicator's name, for messages, and what runs one operation or throws Error.
  OperationQueue(std::string name, std::function<void(Operation&)> execute);

  void Start();
  // Runs an operation, after those before it; in this thread if there are none. Throws Error.
  void Run(Operation operation);
  // The same in the queue's own thread; `done` may destroy what `operation` points to.
  void Enqueue(Operation operation, Done done);
  // Refuses what comes from now on, and waits for what is pending. Returns false if another call
  // does so already.
  bool Close();

  // What waits behind the current operation, for people.
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
  bool busy_ = false;  // somebody runs an operation
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace tfdist
