// The arguments of the kernels that encode, decode and sum values.
#pragma once

#include <cstdint>

#include "codec/codec.h"

namespace tfdist::device {

// Describes the values of a batch, which are encoded together. A batch consists of whole blocks,
// except at the end of a member's part.
struct Batch {
  Codec codec;
  uint64_t count;
  // The values are divided into chunks of `chunk` values. A chunk consists of whole blocks, and all
  // its values are encoded with one seed. The seed of the first chunk is `seed`. The seed of each
  // following chunk is larger by `seed_step`.
  uint64_t chunk;
  uint32_t seed;
  uint32_t seed_step;
};

// The encoded values of one part, which have arrived from all members. This member owns the part
// and sums the values.
struct Arrived {
  Codec codec;
  const uint8_t* encoded;  // the address of the first member's values
  uint64_t stride;  // the number of bytes from one member's values to the next member's values
  uint32_t members;
  // The index of this member. Its own values are not among the encoded values, because they have
  // not been sent.
  uint32_t me;
};

// Scratch memory for kRooms arrays of floats. Each array has room for `each` values, which are all
// values of a batch.
struct Room {
  float* values;
  uint64_t each;

  float* At(uint32_t k) const { return values + k * each; }
};
constexpr uint32_t kRooms = 4;

// Several float32 tensors are treated as one run: the values of all tensors form one sequence. An
// encoded block may begin in one tensor and end in another tensor.

// A stretch is the part of a run that is contiguous in memory, such as the values of one tensor.
struct Stretch {
  float* values;
  uint64_t begin;  // the index of the first value of the stretch in the run
};

// A run is described by its stretches, in ascending order of `begin`. The array of stretches is in
// device memory.
struct Run {
  const Stretch* stretches;
  uint32_t count;  // 0 if the run is empty, such as the residual without error feedback
};

// A position in a run. `begin` is the index of a value in the run.
struct Place {
  Run run;
  uint64_t begin;
};

}  // namespace tfdist::device
