// The launch order of operations on the GPUs of a process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "collective/operation.h"
#include "device/gpu.h"
#include "error.h"

namespace tfdist {

// Guards the waits of concurrent calls for several GPUs of a process that wait for each other: once
// one call fails, ends the waits of all calls.
class Siblings : public Guard {
 public:
  explicit Siblings(Guard& outer) : outer_(outer) {}
  void Fail() { failed_ = true; }
  void Check() override {
    if (failed_) throw Error(Code::kUnavailable, "Another GPU of this process has failed.");
    outer_.Check();
  }

 private:
  Guard& outer_;
  std::atomic<bool> failed_{false};
};

// Calls a function concurrently for each of `count` GPUs. Throws the error of the first failed
// call, if any. Args: siblings: the guard of the calls, which is informed of a failure.
inline void AtOnce(size_t count, const std::function<void(size_t)>& call,
                   Siblings* siblings = nullptr) {
  if (count == 1) return call(0);
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  const auto fail = [&] {
    if (failed.exchange(true)) return;
    error = std::current_exception();
    if (siblings) siblings->Fail();
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count && !failed; ++i) {
    try {
      threads.emplace_back([&call, &fail, i] {
        try {
          call(i);
        } catch (...) { fail(); }
      });
    } catch (...) {  // no more threads can be created
      fail();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

// The launch order of communicators' operations that wait for other GPUs: the same on all GPUs.
// Otherwise each of two GPUs might first run an operation that waits for the other GPU's second
// one.
//
// Once all ranks of an operation have arrived, each proposes a number, and the operation takes the
// largest. A GPU launches the operations of all its communicators by their numbers. Source: Skeen's
// algorithm, in Birman and Joseph, "Reliable communication in the presence of failures", 1987.
//
// This class is the order of one GPU.
class LaunchOrder {
 public:
  // An operation's place in the order, from its proposal until it is launched or abandoned.
  class Turn {
   public:
    // Args: the communicator's unique name, the same on all its ranks.
    Turn(LaunchOrder& order, const cuda::Uuid& communicator);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    size_t proposed() const { return number_; }
    // Args: the largest number proposed by any GPU for the operation.
    void Settle(size_t largest);
    // Waits until no other operation can precede this one. Throws Error if the wait times out or
    // the guard ends it.
    void Await(Guard& guard, double seconds);

   private:
    friend class LaunchOrder;
    bool IsBefore(const Turn& other) const;

    LaunchOrder& order_;
    const cuda::Uuid communicator_;  // decides between equal numbers
    size_t number_ = 0;
  };

  // Returns the order of a GPU of this process.
  static LaunchOrder& Of(int gpu);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t last_ = 0;             // the largest number so far
  std::vector<Turn*> waiting_;  // turns that have not ended
};

// An operation of a process with several GPUs. Each GPU contributes its part when its program
// reaches the operation.
class Assembly {
 public:
  // Receives null or the error.
  using Done = std::function<void(const Error*)>;

  explicit Assembly(size_t gpus) : parts_(gpus) {}

  // Adds a GPU's part. `done` is called when the operation ends, or at once if it has ended.
  void Add(size_t gpu, Operation part, Done done);
  // Waits for all parts, or until `ends` returns true. Returns the parts in the order of the GPUs;
  // empty if some are missing. Throws Error(kMismatch) if the parts differ, and Error(kUnavailable)
  // naming a GPU if its part is late.
  std::vector<Operation> Await(double seconds, const std::function<bool()>& ends);
  // Reports the outcome to all parts.
  void End(const Error* error);

 private:
  struct Part {
    std::optional<Operation> operation;
    Done done;
  };

  void CheckAlike() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Part> parts_;
  size_t missing_ = parts_.size();
  bool ended_ = false;
  std::optional<Error> error_;
};

// The operations that some GPUs, but not all, have reached.
class Assemblies {
 public:
  explicit Assemblies(size_t gpus) : gpus_(gpus) {}

  // Returns the operation that a GPU has reached, and whether it is the first GPU to reach it.
  std::shared_ptr<Assembly> Next(size_t gpu, bool* is_first);
  // Stops expecting parts of an operation that has ended.
  void Drop(const Assembly* ended);

 private:
  struct Open {
    std::shared_ptr<Assembly> assembly;
    std::vector<bool> come;
  };

  const size_t gpus_;
  std::mutex mutex_;
  std::list<Open> open_;
};

}  // namespace tfdist
