// Reductions of values of all types.
#pragma once

#include <cstddef>

#include "types.h"

namespace tfdist {

// An element-wise reduction of several buffers to one buffer.
struct Reduction {
  DType type;
  ReduceOp op;            // kMean computes a sum, which is then divided by `divisor`
  double divisor = 1.0;   // divides the result before it is rounded; only for floating types
  const void* const* in;  // `inputs` buffers with `count` elements each
  int inputs;
  size_t count;
  void* out;  // may be one of the inputs if `out_type` equals `type`
  // The type of the results: `type` itself, the partial type of `type`, or a type that has `type`
  // as its partial type.
  DType out_type = type;
};

// Reduces the inputs in their order. Values of half types are added in float32, and means of
// float32 are computed in float64. Ranks that reduce the same values therefore get the same bits,
// and the mean of equal values is that value.
//
// The vector unit is chosen at run time, since the library may run on a different machine than the
// one on which it was built.
void Reduce(const Reduction& reduction);

// Throws Error(kInvalidArgument) if the reduction is not defined for the type.
void CheckReducible(DType type, ReduceOp op);

// The implementations for each vector unit.

void ReduceOnBaseline(const Reduction& reduction);
void ReduceOnAvx2(const Reduction& reduction);
void ReduceOnAvx512(const Reduction& reduction);

}  // namespace tfdist
