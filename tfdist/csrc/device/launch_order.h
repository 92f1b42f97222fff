// The order in which operations are launched on the GPUs of a process.
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

// Calls a function for several GPUs of a process at once, where each waits for the others.
//
// Ends the waits of all calls once one of them has failed.
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

// Throws the error of the one that has failed first, if any. Args: what the others look at.
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
    } catch (...) {  // there can be no more threads
      fail();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

// The order in which communicators launch what waits for other GPUs: the same on all of them.
// Otherwise each of two GPUs might run first what waits for the second of the other's.
//
// The ranks of an operation, once all have come to it, propose a number each, and the largest is
// the operation's: a GPU launches the operations of all its communicators by their numbers. Source:
// Skeen's algorithm, in Birman and Joseph, "Reliable communication in the presence of failures",
// 1987.
//
// Of one GPU.
class LaunchOrder {
 public:
  // An operation's place in it, from its proposal until it has been launched or given up.
  class Turn {
   public:
    // Args: the communicator's own name among all, the same on all its ranks.
    Turn(LaunchOrder& order, const cuda::Uuid& communicator);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    size_t proposed() const { return number_; }
    // Args: the largest number that any GPU has proposed for the operation.
    void Settle(size_t largest);
    // Waits until nothing else can come before it. Throws Error when that takes too long, or the
    // guard says so.
    void Await(Guard& guard, double seconds);

   private:
    friend class LaunchOrder;
    bool IsBefore(const Turn& other) const;

    LaunchOrder& order_;
    const cuda::Uuid communicator_;  // decides between equal numbers
    size_t number_ = 0;
  };

  // That of a GPU of this process.
  static LaunchOrder& Of(int gpu);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t last_ = 0;             // the largest number so far
  std::vector<Turn*> waiting_;  // turns that have not ended
};

// An operation of a process with several GPUs, each of which brings its part when its program comes
// to it.
class Assembly {
 public:
  // Null, or what went wrong.
  using Done = std::function<void(const Error*)>;

  explicit Assembly(size_t gpus) : parts_(gpus) {}

  // Adds a GPU's part. `done` is called at the end of the operation, at once if that has come.
  void Add(size_t gpu, Operation part, Done done);
  // Waits for all parts, or for what ends the wait, and returns them in the order of the GPUs;
  // empty if some are missing. Throws Error(kMismatch) where they are not alike, and
  // Error(kUnavailable) that names a GPU whose part has not come in time.
  std::vector<Operation> Await(double seconds, const std::function<bool()>& ends);
  // Tells everyone how it ended.
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

// The operations that some GPU has come to, and not yet all.
class Assemblies {
 public:
  explicit Assemblies(size_t gpus) : gpus_(gpus) {}

  // The one that a GPU comes to now, and whether it is the first to.
  std::shared_ptr<Assembly> Next(size_t gpu, bool* is_first);
  // Expects no more parts of an operation that has ended.
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
