// A value of a sparse gradient as it is sent.
#pragma once

#include <cstdint>

namespace tfdist {

struct Row {
  int32_t index;  // in the concatenation of all tensors
  float value;
};
static_assert(sizeof(Row) == 2 * sizeof(int32_t));

}  // namespace tfdist
