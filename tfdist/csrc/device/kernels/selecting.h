// The arguments of the kernels that work on tiles. Some of these kernels select values, and the
// others sum rows.
#pragma once

#include <cstdint>

#include "device/kernels/tiles.h"

// The arguments of the kernels that sum rows.

namespace tfdist::device {

// A tensor into which rows are summed.
struct Target {
  float* values;
  uint32_t count;
  uint32_t first;  // the index of the tensor's first value in the concatenation of all tensors
  uint32_t first_tile;
};
using Targets = TiledList<Target>;

// The rows are divided into runs, so that the indices in each run ascend. A new run begins wherever
// an index is not larger than the previous index, which is usually where the rows of the next rank
// begin. If the first index of a rank is larger than the last index of the previous rank, the rows
// of both ranks form one run. Within a run, each index occurs at most once.
struct RowRuns {
  uint32_t max_runs;  // the number of ranks, because each rank adds at most one run
  uint32_t* wrong;    // not 0 if the rows are invalid
  uint32_t* falls;    // the number of positions in `found`
  // The positions at which a new run begins, apart from the first run. They are in no particular
  // order. There is room for `max_runs` positions.
  uint32_t* found;
  // The positions at which all runs begin, in ascending order, followed by the end of the last run.
  // There is room for `max_runs` + 1 positions.
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

// A tensor from which values are selected. It corresponds to the class `Candidates` on the CPU.
struct Source {
  const float* in;
  float* error;     // null if there is no residual
  float* momentum;  // null if there is no momentum
  uint32_t count;
  float scale;
  float factor;
  uint32_t selected;  // the number of values to select; not used if there is a threshold
  uint32_t first;     // the index of the tensor's first value in the concatenation of all tensors
  uint32_t first_tile;
};
using Sources = TiledList<Source>;

// The counts of a tile. At first, they refer to the values of this tile. `tfdist_select_place`
// replaces them with the counts of all earlier tiles of the same tensor.
struct Tally {
  uint32_t above;  // the number of magnitudes that are larger than the cut
  uint32_t equal;  // the number of magnitudes that are equal to the cut
};

// Intermediate results that one kernel passes to the next one.
struct Cuts {
  // For each tensor, the cut, and the number of values equal to the cut that are selected. All
  // magnitudes that are larger than the cut are selected. If several magnitudes are equal to the
  // cut, the first ones are selected.
  uint32_t* magnitudes;
  uint32_t* equals;
  // For each tensor, the number of its rows. `tfdist_select_sum` replaces this number with the
  // number of rows of all earlier tensors.
  uint32_t* rows;
  // For each tensor, the number of selected values that are not finite.
  uint32_t* not_finite;
  uint32_t* all_rows;
  Tally* tallies;  // the counts of each tile
  // For each tensor of a list and each value that a digit can have, the number of magnitudes that
  // have this digit.
  uint32_t* digits;
};

// A digit of a magnitude: the `bits` bits that begin at bit `shift`. `kDigits` contains the digits
// of a magnitude, from the highest to the lowest.
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
