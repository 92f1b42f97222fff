// Sums of values of all types.
#pragma once

#include <cstddef>

#include "types.h"

namespace tfdist {

// Element-wise reduction of several buffers.
//
// What to reduce, and where to.
struct Reduction {
  DType type;
  ReduceOp op;            // kMean is a sum; `divisor` makes the mean
  double divisor = 1.0;   // of the result, before it is rounded; floating types only
  const void* const* in;  // `inputs` buffers of `count` elements
  int inputs;
  size_t count;
  void* out;  // may be one of the inputs, if it is of their type
  // The partial type of `type`, or the other way round, if the result is not of the same type.
  DType out_type = type;
};

// Reduces in the order of the inputs, half types in float32 and means of float32 in float64, so
// that every rank that reduces the same values gets the same bits, and a mean of equal values is
// that value. The vector unit is chosen at run time: a built library may move to another machine.
void Reduce(const Reduction& reduction);

// Throws Error(kInvalidArgument) if the reduction is not defined for the type.
void CheckReducible(DType type, ReduceOp op);

// The reductions of each vector unit.

void ReduceOnBaseline(const Reduction& reduction);
void ReduceOnAvx2(const Reduction& reduction);
void ReduceOnAvx512(const Reduction& reduction);

}  // namespace tfdist
