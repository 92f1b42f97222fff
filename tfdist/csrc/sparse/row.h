// A row of a sparse gradient: a selected value and its index, in the form in which they are sent.
#pragma once

#include <cstdint>

namespace tfdist {

struct Row {
  int32_t index;  // index of the value in the concatenation of all tensors
  float value;
};
static_assert(sizeof(Row) == 2 * sizeof(int32_t));

}  // namespace tfdist
