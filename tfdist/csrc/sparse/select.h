// Selects values of a gradient, and sums selected rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse/row.h"

namespace tfdist {

// The values of a tensor to select from, and the residual, which keeps the unsent values.
//
// The values are `scale * in`, or the sum of `scale * in` and the earlier residual.
struct Candidates {
  const float* in;
  float* error;     // becomes error + momentum, or error + scale * in if no momentum; null for none
  float* momentum;  // becomes factor * momentum + scale * in, and needs `error`; null for none
  size_t count;
  float scale;
  float factor;

  // The values selected from, after the selection.
  const float* Values() const { return error ? error : in; }
  float Value(size_t index) const { return error ? error[index] : scale * in[index]; }
};
constexpr size_t kMaxCandidates = size_t{1} << 31;

// `SelectLargest` and `SelectAbove` update `error` and `momentum`, and return ascending indices.
// Values are compared by magnitude; NaN is larger than infinity.

// Selects the given number of largest values; among equal values, the first ones.
std::vector<uint32_t> SelectLargest(const Candidates& candidates, size_t selected);

// Selects all values not smaller than a positive threshold.
std::vector<uint32_t> SelectAbove(const Candidates& candidates, float threshold);
// Throws Error unless the threshold is positive.
void CheckThreshold(float threshold);

// Moves each selected value to a row, and removes it from the residual. Args: first: the index of
// the first candidate among the values of all tensors.
void TakeRows(const Candidates& candidates, const std::vector<uint32_t>& indices, int32_t first,
              Row* rows);

// A tensor that rows are summed into.
struct RowSums {
  float* values;
  size_t count;
};

// Sums rows in their order; values without rows become zero. Throws Error for an index out of
// range.
void SumRows(const Row* rows, size_t count, const std::vector<RowSums>& tensors);

}  // namespace tfdist
