// The passes over all values, for each vector unit.
#pragma once

#include "sparse/select.h"

namespace tfdist {

// What a pass works on: candidates [begin, begin + count).
struct Pass {
  const Candidates& candidates;
  size_t begin;
  size_t count;      // at most kPassValues
  bool accumulates;  // or that is done
  float threshold;   // positive
  uint32_t* out;     // room for `count`
};
constexpr size_t kPassValues = 4096;

// Brings error and momentum up to date; writes the indices of what is not smaller than the
// threshold, and returns how many.
size_t PassOnBaseline(const Pass& pass);
size_t PassOnAvx2(const Pass& pass);
size_t PassOnAvx512(const Pass& pass);

}  // namespace tfdist
