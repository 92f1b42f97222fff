// Selects and scatters values by tiles.
#pragma once

#include <cstdint>

#include "device/kernels/tiles.h"

// Arguments of the kernels that sum rows.

namespace tfdist::device {

// A tensor that rows are summed into.
struct Target {
  float* values;
  uint32_t count;
  uint32_t first;  // the index of the first value among those of all tensors
  uint32_t first_tile;
};
using Targets = TiledList<Target>;

// Where indices do not rise, another rank's rows begin. Two ranks' whose indices go on rising are
// one run: no index is in it twice.
struct RowRuns {
  uint32_t most;     // as many as there are ranks
  uint32_t* wrong;   // not 0 if rows are not what ranks send
  uint32_t* falls;   // how often indices do not rise
  uint32_t* found;   // where, in any order; room for `most`
  uint32_t* begins;  // of all runs, in their order, and the end of the last; room for `most` + 1
};

// F(name).
#define TFDIST_FOR_SCATTER_KERNELS(F) \
  F(scatter_find)                     \
  F(scatter_order)                    \
  F(scatter_sum)

}  // namespace tfdist::device

// Arguments of the kernels that select values.

namespace tfdist::device {

// A tensor to select from, as the processor's `Candidates`.
struct Source {
  const float* in;
  float* error;     // null for none
  float* momentum;  // null for none
  uint32_t count;
  float scale;
  float factor;
  uint32_t selected;  // how many values, if their number is given
  uint32_t first;     // the index of the first value among those of all tensors
  uint32_t first_tile;
};
using Sources = TiledList<Source>;

// Of a tile's values, or of those before it in its tensor.
struct Tally {
  uint32_t above;  // have a larger magnitude than the cut
  uint32_t equal;  // have that of the cut
};

// Intermediate results about an operation's tensors, passed between kernels.
struct Cuts {
  // Of each tensor. Selected are magnitudes above this one, and so many that are equal: the first
  // ones.
  uint32_t* magnitudes;
  uint32_t* equals;
  uint32_t* rows;        // how many are selected; then, how many are of the tensors before
  uint32_t* not_finite;  // how many of the selected are not finite
  uint32_t* all_rows;
  Tally* tallies;    // of each tile
  uint32_t* digits;  // of each tensor of a list, how many magnitudes have each digit
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
