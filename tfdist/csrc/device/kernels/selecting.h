// The arguments of the kernels that work on tiles: kernels that select values, and kernels that sum
// rows.
#pragma once

#include <cstdint>

#include "device/kernels/tiles.h"

// The arguments of the kernels that sum rows.

namespace tfdist::device {

// A tensor into which rows are summed.
struct Target {
  float* values;
  uint32_t count;
  uint32_t first;  // index of the first value in the concatenation of all tensors
  uint32_t first_tile;
};
using Targets = TiledList<Target>;

// Runs of rows with ascending indices. A run ends where an index does not ascend, which is usually
// where the rows of one rank end. If the indices also ascend from one rank to the next, the rows of
// both ranks form one run. Each index then occurs only once in this run.
struct RowRuns {
  uint32_t max_runs;  // the number of ranks
  uint32_t* wrong;    // nonzero if the rows are invalid
  uint32_t* falls;    // number of rows with an index that does not ascend
  uint32_t* found;    // positions of these rows, unordered; room for `max_runs`
  // The positions where the runs begin, and the end of the last run. There is room for `max_runs` +
  // 1 positions.
  uint32_t* begins;
};

// Each kernel is listed as F(name).
#define TFDIST_FOR_SCATTER_KERNELS(F) \
  F(scatter_find)                     \
  F(scatter_order)                    \
  F(scatter_sum)

}  // namespace tfdist::device

// The arguments of the kernels that select values.

namespace tfdist::device {

// A tensor from which values are selected. It corresponds to `Candidates` on the CPU.
struct Source {
  const float* in;
  float* error;     // null if there is no residual
  float* momentum;  // null if there is no momentum
  uint32_t count;
  float scale;
  float factor;
  uint32_t selected;  // number of values to select, unless there is a threshold
  uint32_t first;     // index of the first value in the concatenation of all tensors
  uint32_t first_tile;
};
using Sources = TiledList<Source>;

// Counts of the values of a tile, or of all values before this tile in its tensor.
struct Tally {
  uint32_t above;  // number of magnitudes above the cut
  uint32_t equal;  // number of magnitudes equal to the cut
};

// Intermediate results that the kernels pass to each other.
struct Cuts {
  // For each tensor, the cut: a magnitude. All larger magnitudes are selected. Of the magnitudes
  // that are equal to the cut, the first `equals` are selected.
  uint32_t* magnitudes;
  uint32_t* equals;
  // For each tensor, the number of selected values; later, the number of rows before the tensor's
  // rows.
  uint32_t* rows;
  // For each tensor, the number of selected values that are not finite.
  uint32_t* not_finite;
  uint32_t* all_rows;
  Tally* tallies;  // one for each tile
  // For each tensor of a list, the number of magnitudes with each value of a digit.
  uint32_t* digits;
};

// The digits by which magnitudes are compared, from the highest to the lowest.
struct Digit {
  uint32_t shift;
  uint32_t bits;
};
constexpr Digit kDigits[] = {{20, 11}, {10, 10}, {0, 10}};
constexpr uint32_t kDigitValues = 1 << 11;

// Each kernel is listed as F(name).
#define TFDIST_FOR_SELECT_KERNELS(F) \
  F(select_digits)                   \
  F(select_narrow)                   \
  F(select_count)                    \
  F(select_place)                    \
  F(select_sum)                      \
  F(select_take)                     \
  F(select_forget)

}  // namespace tfdist::device
