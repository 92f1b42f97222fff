// Tensors of float32, seen as one run of values: a block that is encoded may begin in one tensor and
// end in another.
#pragma once

#include <cstdint>

namespace tfdist::device {

struct Stretch {
  float* values;
  uint64_t begin;  // of its first value in the run
};

// In the order of their values. The stretches are in the GPU's memory.
struct Run {
  const Stretch* stretches;
  uint32_t count;  // 0 for a run that there is not
};

// Some values of a run.
struct Place {
  Run run;
  uint64_t begin;
};

}  // namespace tfdist::device
