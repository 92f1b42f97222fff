// What the kernels of codecs are given.
#pragma once

#include <cstdint>

#include "codec/codec.h"

namespace tfdist::device {

// Values that are encoded: whole blocks, unless the part of a member ends.
struct Batch {
  Codec codec;
  uint64_t count;
  // The random numbers of so many values, whole blocks, go on from one seed: that of the first
  // chunk, and so much more for each next one.
  uint64_t chunk;
  uint32_t seed;
  uint32_t seed_step;
};

// Everyone's encoded values of the part that a member sums.
struct Arrived {
  Codec codec;
  const uint8_t* encoded;  // the first member's
  uint64_t stride;         // bytes to the next one's
  uint32_t members;
  uint32_t me;  // whose own values are as they were
};

// Room for floats while kernels run, several times as many as a batch has values.
struct Room {
  float* values;
  uint64_t each;

  float* At(uint32_t k) const { return values + k * each; }
};
constexpr uint32_t kRooms = 4;

// Tensors of float32, seen as one run of values: a block that is encoded may begin in one tensor
// and end in another.

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
