// A value of a sparse gradient as it is sent.
#pragma once

#include <cstdint>

namespace tfdist {

struct Row {
  int32_t index;  // among the values of all tensors, one after the other
  float value;
};
static_assert(sizeof(Row) == 2 * sizeof(int32_t));

}  // namespace tfdist
