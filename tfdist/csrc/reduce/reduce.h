// Reduces buffers element by element, for all element types.
#pragma once

#include <cstddef>

#include "types.h"

namespace tfdist {

// An element-wise reduction of several input buffers to one output buffer.
struct Reduction {
  DType type;
  // kMean computes a sum, like kSum. The caller sets `divisor` so that the sum becomes a mean.
  ReduceOp op;
  // Each result is divided by this number before it is rounded. Only for floating types.
  double divisor = 1.0;
  const void* const* in;  // the addresses of `inputs` buffers with `count` elements each
  int inputs;
  size_t count;
  void* out;  // the output buffer; may be one of the inputs if `out_type` equals `type`
  // The type of the results, which is usually `type`. If the results will be reduced further, it
  // may be the partial type of `type` (see `PartialType`). If the inputs are partial results, it
  // may be the original type of the values.
  DType out_type = type;
};

// Reduces the inputs in their order. Values of half types are reduced in float32, and means of
// float32 values are computed in float64. Ranks that reduce the same values therefore get bitwise
// identical results. The mean of equal values is exactly this value.
//
// The vector unit is chosen at run time, because the library may be compiled on one machine and run
// on another.
void Reduce(const Reduction& reduction);

// Throws Error(kInvalidArgument) if the reduction is not defined for the type.
void CheckReducible(DType type, ReduceOp op);

// The implementations of `Reduce`, one for each vector unit.

void ReduceOnBaseline(const Reduction& reduction);
void ReduceOnAvx2(const Reduction& reduction);
void ReduceOnAvx512(const Reduction& reduction);

}  // namespace tfdist
