// Element-wise reduction of several buffers.
#pragma once

#include <cstddef>

#include "types.h"

namespace tfdist {

// What to reduce, and where to.
struct Reduction {
  DType type;
  ReduceOp op;            // kMean is a sum; `scale` makes the mean
  double scale = 1.0;     // multiplies the result, before it is rounded; floating types only
  const void* const* in;  // `inputs` buffers of `count` elements
  int inputs;
  size_t count;
  void* out;  // may be one of the inputs, if it is of their type
  // float32 for half types, or a half type for float32, where the result is not of the same type.
  DType out_type = type;
};

// Reduces in the order of the inputs, half types in float32, so that every rank that reduces the
// same values gets the same bits. The vector unit is chosen at run time: a built library may move
// to another machine.
void Reduce(const Reduction& reduction);

// Throws Error(kInvalidArgument) if the reduction is not defined for the type.
void CheckReducible(DType type, ReduceOp op);

}  // namespace tfdist
