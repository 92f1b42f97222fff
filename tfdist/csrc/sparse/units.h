// The passes over all values, for each vector unit.
#pragma once

#include "sparse/select.h"

namespace tfdist {

// The arguments of a pass over the candidates [begin, begin + count).
struct Pass {
  const Candidates& candidates;
  size_t begin;
  size_t count;      // at most kPassValues
  bool accumulates;  // whether this pass updates error and momentum; if not, an earlier one did
  float threshold;   // positive
  uint32_t* out;     // room for `count`
};
constexpr size_t kPassValues = 4096;

// Updates error and momentum. Writes the indices of candidates that are not smaller than the
// threshold, and returns their number.
size_t PassOnBaseline(const Pass& pass);
size_t PassOnAvx2(const Pass& pass);
size_t PassOnAvx512(const Pass& pass);

}  // namespace tfdist
