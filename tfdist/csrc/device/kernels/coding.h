// The arguments of the kernels that encode, decode and sum.
#pragma once

#include <cstdint>

#include "codec/codec.h"

namespace tfdist::device {

// Describes values that are encoded. They consist of whole blocks, except at the end of a member's
// part.
struct Batch {
  Codec codec;
  uint64_t count;
  // The values are divided into chunks of `chunk` values, which consist of whole blocks. Each chunk
  // has one seed. The first chunk has the seed `seed`, and the seed of each following chunk is
  // larger by `seed_step`.
  uint64_t chunk;
  uint32_t seed;
  uint32_t seed_step;
};

// The encoded values of the part that this member sums, from all members.
struct Arrived {
  Codec codec;
  const uint8_t* encoded;  // the values of the first member
  uint64_t stride;         // bytes from one member's values to the next member's values
  uint32_t members;
  uint32_t me;  // index of this member; its own values are not encoded
};

// Scratch memory for kRooms arrays of floats. Each array has room for all values of a batch.
struct Room {
  float* values;
  uint64_t each;

  float* At(uint32_t k) const { return values + k * each; }
};
constexpr uint32_t kRooms = 4;

// Tensors of float32 that are treated as one run of values. An encoded block may begin in one
// tensor and end in another tensor.

struct Stretch {
  float* values;
  uint64_t begin;  // index of the first value in the run
};

// The stretches of a run, in ascending order of `begin`. The array is in GPU memory.
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
