// Gives a half-warp contiguous access to the values of a block, even if the
// block extends over several tensors.
#pragma once

#include <cstdint>

#include "device/kernels/coding.h"
#include "device/kernels/execution.h"

namespace tfdist::device {

// The values of a block. If they are all in one tensor, the half-warp accesses them directly.
// Otherwise, it accesses a copy: `Fetch` copies the values from the tensors, and `Return` copies
// them back to the tensors.
class Window {
 public:
  // Args: place: the position of the batch in a run; offset: the index of the block's first value
  // in the batch; count: the number of values in the block; copies: memory for copies of all values
  // of the batch.
  Window(const Place& place, uint64_t offset, uint32_t count, float* copies)
      : run_(place.run), begin_(place.begin + offset), count_(count) {
    if (run_.count == 0) return;
    const uint32_t first = Find(begin_);
    copied_ = first + 1 < run_.count && run_.stretches[first + 1].begin < begin_ + count;
    values_ = copied_ ? copies + offset : At(first, begin_);
  }

  // Returns the address of the block's values, or null if the run is empty.
  float* values() const { return values_; }

  void Fetch() const {
    if (!copied_) return;
    for (uint32_t i = Lane(); i < count_; i += kHalfWarp)
      values_[i] = *At(Find(begin_ + i), begin_ + i);
    SyncHalfWarp();
  }
  void Return() const {
    if (!copied_) return;
    SyncHalfWarp();
    for (uint32_t i = Lane(); i < count_; i += kHalfWarp)
      *At(Find(begin_ + i), begin_ + i) = values_[i];
  }

 private:
  float* At(uint32_t stretch, uint64_t value) const {
    return run_.stretches[stretch].values + (value - run_.stretches[stretch].begin);
  }
  // Returns the index of the stretch that contains a value of the run.
  uint32_t Find(uint64_t value) const {
    uint32_t first = 0, behind = run_.count;
    while (behind - first > 1) {
      const uint32_t middle = (first + behind) / 2;
      if (run_.stretches[middle].begin <= value) {
        first = middle;
      } else {
        behind = middle;
      }
    }
    return first;
  }

  const Run run_;
  const uint64_t begin_;
  const uint32_t count_;
  bool copied_ = false;
  float* values_ = nullptr;
};

}  // namespace tfdist::device
