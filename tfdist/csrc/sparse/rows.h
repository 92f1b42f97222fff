// Makes rows of a sparse gradient from tensors, and tensors from rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse/row.h"
#include "sparse/select.h"

namespace tfdist {

// Moves selected values to as many rows: what is sent is no longer kept. Args: first: the index of the
// first candidate among the values of all tensors.
void TakeRows(const Candidates& candidates, const std::vector<uint32_t>& indices, int32_t first,
              Row* rows);

// A tensor that rows are summed into.
struct RowSums {
  float* values;
  size_t count;
};

// Sums rows in their order; zeros where no row has a value. Throws Error for an index of no value.
void SumRows(const Row* rows, size_t count, const std::vector<RowSums>& tensors);

}  // namespace tfdist
