// Runs a communicator's operations one after the other: in the thread that asks, or in its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collective/operation.h"
#include "error.h"

namespace tfdist {

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
