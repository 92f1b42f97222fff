// Functions that process the values of a tensor in one pass. There is one function for each vector
// unit.
#pragma once

#include "sparse/select.h"

namespace tfdist {

// The arguments of a pass over the candidates [begin, begin + count) of a tensor.
struct Pass {
  const Candidates& candidates;
  size_t begin;
  size_t count;  // at most kPassValues
  // Whether this pass updates `error` and `momentum`. If it does not, an earlier pass has already
  // updated them.
  bool accumulates;
  float threshold;  // positive
  uint32_t* out;    // receives the indices; has room for `count` of them
};
constexpr size_t kPassValues = 4096;

// If `accumulates` is set, these functions first update `error` and `momentum`. Then they write the
// indices of the candidates with a magnitude of at least `threshold` to `out`, and return the
// number of these indices.
size_t PassOnBaseline(const Pass& pass);
size_t PassOnAvx2(const Pass& pass);
size_t PassOnAvx512(const Pass& pass);

}  // namespace tfdist
