// A row of a sparse gradient: a selected value and its index. Ranks send rows to each other in this
// form.
#pragma once

#include <cstdint>

namespace tfdist {

struct Row {
  int32_t index;  // the index of the value in the concatenation of all tensors
  float value;
};
static_assert(sizeof(Row) == 2 * sizeof(int32_t));

}  // namespace tfdist
