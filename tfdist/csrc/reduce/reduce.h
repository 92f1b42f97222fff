// Reductions of values of all types.
#pragma once

#include <cstddef>

#include "types.h"

namespace tfdist {

// Element-wise reduction of several buffers.
struct Reduction {
  DType type;
  ReduceOp op;            // kMean is a sum; `divisor` makes the mean
  double divisor = 1.0;   // of the result, before it is rounded; floating types only
  const void* const* in;  // `inputs` buffers of `count` elements
  int inputs;
  size_t count;
  void* out;  // may be one of the inputs if `out_type` is their type
  // `type`, the partial type of `type`, or a type with `type` as its partial type.
  DType out_type = type;
};

// Reduces in the order of the inputs, half types in float32 and means of float32 in float64. Every
// rank that reduces the same values gets the same bits, and a mean of equal values is that value.
// The vector unit is chosen at run time, since a library may run on another machine than the one
// that built it.
void Reduce(const Reduction& reduction);

// Throws Error(kInvalidArgument) if the reduction is not defined for the type.
void CheckReducible(DType type, ReduceOp op);

// The reductions of each vector unit.

void ReduceOnBaseline(const Reduction& reduction);
void ReduceOnAvx2(const Reduction& reduction);
void ReduceOnAvx512(const Reduction& reduction);

}  // namespace tfdist
