// Selects the values of a gradient that are sent, and sums the selected values of all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse/row.h"

namespace tfdist {

// The values of a tensor from which some are selected, and the residual, which accumulates the
// values that are not sent.
//
// Without a residual, the candidates are the values `scale * in`. With a residual, `scale * in` or
// the momentum is first added to the residual, and the candidates are the values of the residual.
struct Candidates {
  const float* in;
  // The residual. It becomes error + momentum, or error + scale * in if there is no momentum. Null
  // if there is no residual.
  float* error;
  // The momentum. It becomes factor * momentum + scale * in. It requires `error`. Null if there is
  // no momentum.
  float* momentum;
  size_t count;
  float scale;
  float factor;

  // Returns the candidates, after `error` and `momentum` have been updated. Without a residual,
  // these are the values of `in`, which are not yet multiplied by `scale`.
  const float* Values() const { return error ? error : in; }
  float Value(size_t index) const { return error ? error[index] : scale * in[index]; }
};
constexpr size_t kMaxCandidates = size_t{1} << 31;

// `SelectLargest` and `SelectAbove` first update `error` and `momentum`. Then they return the
// indices of the selected values, in ascending order. They compare values by magnitude, and NaN
// counts as larger than infinity.

// Selects the `selected` largest values. Of values with equal magnitudes, selects the first ones.
std::vector<uint32_t> SelectLargest(const Candidates& candidates, size_t selected);

// Selects all values with a magnitude of at least `threshold`, which must be positive.
std::vector<uint32_t> SelectAbove(const Candidates& candidates, float threshold);
// Throws Error(kInvalidArgument) unless the threshold is positive.
void CheckThreshold(float threshold);

// Writes the selected values to `rows`, and sets them to zero in the residual and in the momentum.
// Args: first: the index of the tensor's first value in the concatenation of all tensors.
void TakeRows(const Candidates& candidates, const std::vector<uint32_t>& indices, int32_t first,
              Row* rows);

// A tensor into which rows are summed.
struct RowSums {
  float* values;
  size_t count;
};

// Adds the value of each row to the tensor value with the row's index, in the order of the rows.
// Tensor values without rows become zero. Throws Error(kInvalidArgument) if an index is out of
// range.
void SumRows(const Row* rows, size_t count, const std::vector<RowSums>& tensors);

}  // namespace tfdist
