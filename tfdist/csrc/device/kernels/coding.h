// Arguments of the codec kernels.
#pragma once

#include <cstdint>

#include "codec/codec.h"

namespace tfdist::device {

// Values to be encoded: whole blocks, except at the end of a member's part.
struct Batch {
  Codec codec;
  uint64_t count;
  // `chunk` values, in whole blocks, share a seed: `seed` for the first chunk, and `seed_step` more
  // for each following one.
  uint64_t chunk;
  uint32_t seed;
  uint32_t seed_step;
};

// All members' encoded values of the part that this member sums.
struct Arrived {
  Codec codec;
  const uint8_t* encoded;  // the first member's
  uint64_t stride;         // bytes between two members
  uint32_t members;
  uint32_t me;  // this member; its own values are unencoded
};

// Scratch memory for floats: `kRooms` times the number of values of a batch.
struct Room {
  float* values;
  uint64_t each;

  float* At(uint32_t k) const { return values + k * each; }
};
constexpr uint32_t kRooms = 4;

// Tensors of float32 as one run of values: an encoded block may begin in one tensor and end in
// another.

struct Stretch {
  float* values;
  uint64_t begin;  // the first value's index in the run
};

// Stretches in ascending order of their values. The array is in GPU memory.
struct Run {
  const Stretch* stretches;
  uint32_t count;  // 0 if there is no run
};

// A position in a run.
struct Place {
  Run run;
  uint64_t begin;
};

}  // namespace tfdist::device
