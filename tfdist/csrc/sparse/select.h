// Selects the values of a sparse gradient that a rank sends, and sums the selected values of all
// ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse/row.h"

namespace tfdist {

// The candidates of a tensor: the values from which the values to be sent are selected.
//
// Without a residual, the candidates are the values of `scale * in`. With a residual, values that
// are not sent are not lost: they remain in the residual, and are candidates again in later steps.
// Before the selection, `scale * in` is added to the residual. With momentum, the updated momentum
// is added instead. The candidates are then the values of the residual.
struct Candidates {
  const float* in;
  // The residual. Before the selection, it is set to error + momentum, or to error + scale * in
  // without momentum. Null if there is no residual.
  float* error;
  // The momentum. Before the selection, it is set to factor * momentum + scale * in. It requires
  // `error`. Null if there is no momentum.
  float* momentum;
  size_t count;
  float scale;
  float factor;

  // Returns the address of the candidates. `error` and `momentum` must already have been updated.
  // Without a residual, returns `in`, and the caller must multiply its values by `scale`.
  const float* Values() const { return error ? error : in; }
  float Value(size_t index) const { return error ? error[index] : scale * in[index]; }
};
constexpr size_t kMaxCandidates = size_t{1} << 31;

// `SelectLargest` and `SelectAbove` first update `error` and `momentum`. Then they return the
// indices of the selected values, in ascending order. They compare the magnitudes of the values.
// The magnitude of NaN counts as larger than infinity.

// Selects the `selected` values with the largest magnitudes. If values have equal magnitudes,
// selects the first ones.
std::vector<uint32_t> SelectLargest(const Candidates& candidates, size_t selected);

// Selects all values with a magnitude of at least `threshold`, which must be positive.
std::vector<uint32_t> SelectAbove(const Candidates& candidates, float threshold);
// Throws Error(kInvalidArgument) unless the threshold is positive.
void CheckThreshold(float threshold);

// Writes the selected values and their indices to `rows`, and sets these values to zero in the
// residual and in the momentum. If a selected value is not finite, also sets all other values that
// are not finite to zero there.
// Args: indices: the indices of the selected values in their tensor; first: the index of the
// tensor's first value in the concatenation of all tensors.
void TakeRows(const Candidates& candidates, const std::vector<uint32_t>& indices, int32_t first,
              Row* rows);

// A tensor into which rows are summed.
struct RowSums {
  float* values;
  size_t count;
};

// Sums rows into tensors. First sets all values of the tensors to zero. Then, for each row, adds
// the row's value to the tensor value that has the row's index in the concatenation of all tensors.
// The rows are added in their order. Throws Error(kInvalidArgument) if an index is out of range.
void SumRows(const Row* rows, size_t count, const std::vector<RowSums>& tensors);

}  // namespace tfdist
