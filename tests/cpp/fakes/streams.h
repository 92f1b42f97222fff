// Streams and events of the fake driver: a stream's work runs in a thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace tfdist::cuda {

// Runs submitted work in its own thread.
struct Queue {
  Queue() : thread([this] { Work(); }) {}
  ~Queue() {
    Enqueue([this] { ends = true; });
    thread.join();
  }
  void Enqueue(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      tasks.push_back(std::move(task));
    }
    changed.notify_all();
  }
  void Work() {
    while (!ends) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return !tasks.empty(); });
      const std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool ends = false;
  std::thread thread;
};

struct Stream {
  void Enqueue(std::function<void()> task) const { queue->Enqueue(std::move(task)); }
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
};

// A recording, which has passed or not; waiting tasks keep it alive.
struct Mark {
  void Pass() {
    const std::lock_guard<std::mutex> lock(mutex);
    passed = true;
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return passed; });
  }
  bool HasPassed() {
    const std::lock_guard<std::mutex> lock(mutex);
    return passed;
  }

  std::mutex mutex;
  std::condition_variable changed;
  bool passed = false;
};
struct Event {
  std::shared_ptr<Mark> mark;
};

}  // namespace tfdist::cuda
