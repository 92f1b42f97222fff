// The order in which the GPUs of a process launch their operations.
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

// The guard of concurrent calls for several GPUs of a process, which wait for each other. When one
// of the calls fails, this guard ends the waits of all calls.
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

// Calls a function concurrently for each of `count` GPUs. If a call fails, throws the error of the
// call that failed first.
// Args: siblings: the guard of the calls. It is notified when a call fails.
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

// The order in which a GPU launches operations that wait for other GPUs. The order is the same on
// all GPUs. Otherwise, each of two GPUs could first run an operation that waits for the second
// operation of the other GPU.
//
// When all ranks of an operation have arrived, each rank proposes a number, and the operation gets
// the largest of these numbers. A GPU launches the operations of all its communicators in the order
// of their numbers. Source: Skeen's algorithm, in Birman and Joseph, "Reliable communication in the
// presence of failures", 1987.
//
// An object of this class is the order of one GPU.
class LaunchOrder {
 public:
  // The place of an operation in the order, from the proposal of its number until it is launched or
  // abandoned.
  class Turn {
   public:
    // Args: communicator: the unique name of the communicator, which is the same on all its ranks.
    Turn(LaunchOrder& order, const cuda::Uuid& communicator);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    size_t proposed() const { return number_; }
    // Args: largest: the largest number that any GPU has proposed for this operation.
    void Settle(size_t largest);
    // Waits until no other operation can precede this operation. Throws Error if the wait takes
    // longer than `seconds`, or if the guard ends it.
    void Await(Guard& guard, double seconds);

   private:
    friend class LaunchOrder;
    bool IsBefore(const Turn& other) const;

    LaunchOrder& order_;
    const cuda::Uuid communicator_;  // determines the order of equal numbers
    size_t number_ = 0;
  };

  // Returns the launch order of a GPU of this process.
  static LaunchOrder& Of(int gpu);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t last_ = 0;             // the largest number so far
  std::vector<Turn*> waiting_;  // the turns that have not ended
};

// An operation of a process with several GPUs. Each GPU adds its part when its program reaches the
// operation.
class Assembly {
 public:
  // Receives null if the operation succeeded, and the error otherwise.
  using Done = std::function<void(const Error*)>;

  explicit Assembly(size_t gpus) : parts_(gpus) {}

  // Adds the part of a GPU. `done` is called when the operation ends, or immediately if it has
  // already ended.
  void Add(size_t gpu, Operation part, Done done);
  // Waits until all GPUs have added their parts, or until `ends` returns true. Returns the parts in
  // the order of the GPUs, or an empty list if parts are missing. Throws Error(kMismatch) if the
  // parts differ, and Error(kUnavailable) with the name of a GPU if its part is late.
  std::vector<Operation> Await(double seconds, const std::function<bool()>& ends);
  // Ends the operation, and reports the outcome to all parts.
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

// The operations that some but not all GPUs have reached.
class Assemblies {
 public:
  explicit Assemblies(size_t gpus) : gpus_(gpus) {}

  // Returns the operation that a GPU has reached. Sets `*is_first` to whether this GPU is the first
  // one to reach it.
  std::shared_ptr<Assembly> Next(size_t gpu, bool* is_first);
  // Forgets an operation that has ended, so that no more parts of it are expected.
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
