// What the kernels that sum rows are given.
#pragma once

#include <cstdint>

#include "device/kernels/tiles.h"

namespace tfdist::device {

// A tensor that rows are summed into.
struct Target {
  float* values;
  uint32_t count;
  uint32_t first;  // the index of the first value among those of all tensors
  uint32_t first_tile;
};
using Targets = TiledList<Target>;

// Where indices do not rise, another rank's rows begin. Two ranks' whose indices go on rising are one
// run: no index is in it twice.
struct RowRuns {
  uint32_t most;    // as many as there are ranks
  uint32_t* wrong;  // not 0 if rows are not what ranks send
  uint32_t* falls;  // how often indices do not rise
  uint32_t* found;  // where, in any order; room for `most`
  uint32_t* begins;  // of all runs, in their order, and the end of the last; room for `most` + 1
};

// F(name).
#define TFDIST_FOR_SCATTER_KERNELS(F) \
  F(scatter_find)                     \
  F(scatter_order)                    \
  F(scatter_sum)

}  // namespace tfdist::device
