// Passes over all values of a tensor, compiled separately for each vector unit.
#pragma once

#include "sparse/select.h"

namespace tfdist {

// The arguments of a pass over the candidates [begin, begin + count).
struct Pass {
  const Candidates& candidates;
  size_t begin;
  size_t count;  // at most kPassValues
  // Whether this pass updates `error` and `momentum`. If not, an earlier pass has already updated
  // them.
  bool accumulates;
  float threshold;  // positive
  uint32_t* out;    // room for `count` indices
};
constexpr size_t kPassValues = 4096;

// Updates `error` and `momentum` if `accumulates` is set. Then writes the indices of the candidates
// with a magnitude of at least `threshold` to `out`, and returns the number of these candidates.
size_t PassOnBaseline(const Pass& pass);
size_t PassOnAvx2(const Pass& pass);
size_t PassOnAvx512(const Pass& pass);

}  // namespace tfdist
