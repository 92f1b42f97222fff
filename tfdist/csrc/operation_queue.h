// A communicator's queue of operations, and its progress.
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

// The time of the group's last progress, as known to this rank.
class ProgressClock {
 public:
  using Clock = std::chrono::steady_clock;

  // Records progress of this rank; called by the thread that runs its operations. Reads no clock.
  void Note() {
    count_.store(count_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  // The number of calls of `Note`, modulo 2^32; sent to the other ranks.
  uint32_t count() const { return count_.load(std::memory_order_relaxed); }

  // Records progress of another rank; may be called from any thread.
  void NoteOther() { last_ = Clock::now().time_since_epoch().count(); }

  // Returns the time when progress of any rank was last seen; may be called from any thread.
  // Progress of this rank since the last call counts as made now.
  Clock::time_point Last() {
    const uint32_t now = count();
    if (now != seen_) {
      NoteOther();
      seen_ = now;  // stored last: no other thread may pair the new count with the old time
    }
    return Clock::time_point(Clock::duration(last_));
  }

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> seen_{0};
  std::atomic<Clock::rep> last_{0};
};

// Runs a communicator's operations one at a time, in the calling thread or in its own.
class OperationQueue {
 public:
  // Receives null or the error; called in the queue's thread, or by `Enqueue` if the queue has been
  // closed. It must not throw or wait for the queue.
  using Done = std::function<void(const Error*)>;

  // Args: the communicator's name, for messages, and a function that runs one operation or throws
  // Error.
  OperationQueue(std::string name, std::function<void(Operation&)> execute);

  void Start();
  // Runs an operation after all earlier ones, in this thread if none are pending. Throws Error.
  void Run(Operation operation);
  // Runs an operation in the queue's own thread. `done` may destroy the buffers of `operation`.
  void Enqueue(Operation operation, Done done);
  // Refuses new operations and waits for pending ones. Returns false if it was called before.
  bool Close();

  // Descriptions of the operations queued behind the current one.
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
  bool busy_ = false;  // a thread is running an operation
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace tfdist
