// Whether the next batch of a dataset is its last one once more, as Python asks for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace tfdist {

class Replay {
 public:
  // Has the next batch be the last one again.
  void Request() { wanted_ = true; }
  // Before each batch: whether it has been asked for, which it is then no longer.
  bool Take() { return wanted_.exchange(false); }
  void Count() { ++given_; }
  // The number of batches so far, without repetitions.
  int64_t given() const { return given_; }

 private:
  std::atomic<bool> wanted_{false};
  std::atomic<int64_t> given_{0};
};

// Returns its number in this process, from 1; a number is never used again.
int64_t RegisterReplay();

// Throws Error(kClosed) if there is none of this number any more.
std::shared_ptr<Replay> FindReplay(int64_t number);

void RemoveReplay(int64_t number);

}  // namespace tfdist
