// Determines the order in which the GPUs of a process launch their operations.
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

// A guard for calls that run concurrently, one for each GPU of a process. The calls may wait for
// each other. If one call fails, this guard therefore ends the waits of all other calls.
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

// Calls a function for each of `count` GPUs, concurrently, and waits until all calls have ended. If
// calls fail, throws the error of the first failure.
// Args: siblings: the guard that the calls check while they wait. If a call fails, it ends the
// waits of the other calls.
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
    } catch (...) {  // the system cannot create another thread
      fail();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

// The order in which a GPU launches operations that wait for other GPUs. All GPUs must launch these
// operations in the same order. Otherwise, two GPUs could wait for each other forever: each of them
// would run an operation that the other GPU launches only later.
//
// The order is determined by numbers. When all ranks have joined an operation, each rank proposes a
// number, and the operation gets the largest of these numbers. A GPU launches the operations of all
// its communicators in the order of their numbers. Source: Skeen's algorithm, in Birman and Joseph,
// "Reliable communication in the presence of failures", 1987.
//
// Each GPU has one object of this class.
class LaunchOrder {
 public:
  // The place of an operation in the order of a GPU. The operation has this place while this object
  // exists: from the proposal of its number until it has been launched or abandoned.
  class Turn {
   public:
    // Args: communicator: the unique name of the operation's communicator. It is the same on all
    // ranks.
    Turn(LaunchOrder& order, const cuda::Uuid& communicator);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    size_t proposed() const { return number_; }
    // Replaces the proposed number with the final number of the operation.
    // Args: largest: the largest number that any GPU has proposed for this operation.
    void Settle(size_t largest);
    // Waits until all operations that precede this operation have given up their places, and no
    // other operation can get a place before it. Throws Error if this takes longer than `seconds`,
    // or if the guard ends the wait.
    void Await(Guard& guard, double seconds);

   private:
    friend class LaunchOrder;
    bool IsBefore(const Turn& other) const;

    LaunchOrder& order_;
    // If two operations have the same number, the names of their communicators determine the order.
    const cuda::Uuid communicator_;
    size_t number_ = 0;
  };

  // Returns the launch order of a GPU.
  // Args: gpu: the index of the GPU among the GPUs visible to this process.
  static LaunchOrder& Of(int gpu);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t last_ = 0;             // the largest number that has been proposed or settled
  std::vector<Turn*> waiting_;  // all existing turns of this GPU
};

// Collects the parts of an operation if a process has several GPUs. Each GPU adds its part when its
// program reaches the operation.
class Assembly {
 public:
  // A function that is called when the operation has ended. Its argument is null if the operation
  // has succeeded; otherwise, it is the error.
  using Done = std::function<void(const Error*)>;

  explicit Assembly(size_t gpus) : parts_(gpus) {}

  // Adds the part of a GPU. Calls `done` when the operation ends. If it has already ended, calls
  // `done` immediately, with an error.
  void Add(size_t gpu, Operation part, Done done);
  // Waits until all GPUs have added their parts, and returns the parts in the order of the GPUs. If
  // `ends` returns true before that, returns an empty list. Throws Error(kMismatch) if the GPUs
  // have reached different operations. Throws Error(kUnavailable) if parts are still missing after
  // `seconds` seconds; the message names a GPU that has not added its part.
  std::vector<Operation> Await(double seconds, const std::function<bool()>& ends);
  // Ends the operation, and reports its outcome to the GPUs that have added their parts.
  // Args: error: the reason for which the operation has failed; null if it has succeeded.
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

// The operations that some GPUs of this process have reached, and others have not.
class Assemblies {
 public:
  explicit Assemblies(size_t gpus) : gpus_(gpus) {}

  // Returns the operation that a GPU has reached. This is the first operation to which this GPU has
  // not yet added its part. If there is no such operation, begins a new one and sets `*is_first` to
  // true; otherwise, sets `*is_first` to false.
  std::shared_ptr<Assembly> Next(size_t gpu, bool* is_first);
  // Removes an operation that has ended, so that `Next` does not return it any more.
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
