// The order in which communicators launch what waits for other GPUs: the same on all of them. Otherwise
// each of two GPUs might run first what waits for the second of the other's.
//
// The ranks of an operation, once all have come to it, propose a number each, and the largest is the
// operation's: a GPU launches the operations of all its communicators by their numbers. Source: Skeen's
// algorithm, in Birman and Joseph, "Reliable communication in the presence of failures", 1987.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "device/cuda.h"
#include "guard.h"

namespace tfdist {

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

}  // namespace tfdist
