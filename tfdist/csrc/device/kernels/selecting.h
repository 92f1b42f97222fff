// Arguments of the kernels that select and scatter values by tiles.
#pragma once

#include <cstdint>

#include "device/kernels/tiles.h"

// Arguments of the kernels that sum rows.

namespace tfdist::device {

// A tensor that rows are summed into.
struct Target {
  float* values;
  uint32_t count;
  uint32_t first;  // the first value's index in the concatenation of all tensors
  uint32_t first_tile;
};
using Targets = TiledList<Target>;

// Rows of different ranks are separated by indices that do not ascend. If the indices ascend across
// two ranks, both ranks' rows form one run without repeated indices.
struct RowRuns {
  uint32_t max_runs;  // the number of ranks
  uint32_t* wrong;    // nonzero if the rows are invalid
  uint32_t* falls;    // number of rows with an index that does not ascend
  uint32_t* found;    // their positions, unordered; room for `max_runs`
  uint32_t* begins;   // beginnings of the runs, and the end of the last; room for `max_runs` + 1
};

// F(name).
#define TFDIST_FOR_SCATTER_KERNELS(F) \
  F(scatter_find)                     \
  F(scatter_order)                    \
  F(scatter_sum)

}  // namespace tfdist::device

// Arguments of the kernels that select values.

namespace tfdist::device {

// A tensor to select from, like the processor's `Candidates`.
struct Source {
  const float* in;
  float* error;     // null for none
  float* momentum;  // null for none
  uint32_t count;
  float scale;
  float factor;
  uint32_t selected;  // number of values to select, if given
  uint32_t first;     // the first value's index in the concatenation of all tensors
  uint32_t first_tile;
};
using Sources = TiledList<Source>;

// Counts of a tile's values, or of the values before it in its tensor.
struct Tally {
  uint32_t above;  // magnitudes above the cut
  uint32_t equal;  // magnitudes equal to the cut
};

// Intermediate results about an operation's tensors, passed between kernels.
struct Cuts {
  // Per tensor, the cut: all larger magnitudes are selected, and the first `equals` of the equal
  // magnitudes.
  uint32_t* magnitudes;
  uint32_t* equals;
  uint32_t* rows;        // number of selected values; later, of rows before this tensor's
  uint32_t* not_finite;  // number of selected values that are not finite
  uint32_t* all_rows;
  Tally* tallies;    // per tile
  uint32_t* digits;  // per tensor of a list, the number of magnitudes with each digit
};

// Magnitudes are compared digit by digit, the highest first.
struct Digit {
  uint32_t shift;
  uint32_t bits;
};
constexpr Digit kDigits[] = {{20, 11}, {10, 10}, {0, 10}};
constexpr uint32_t kDigitValues = 1 << 11;

// F(name).
#define TFDIST_FOR_SELECT_KERNELS(F) \
  F(select_digits)                   \
  F(select_narrow)                   \
  F(select_count)                    \
  F(select_place)                    \
  F(select_sum)                      \
  F(select_take)                     \
  F(select_forget)

}  // namespace tfdist::device
