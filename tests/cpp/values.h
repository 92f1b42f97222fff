// The inputs of a test's ranks, and the expected results.
#pragma once

#include <cstddef>
#include <vector>

#include "types.h"

namespace tfdist::testing {

// Small integers that depend on the rank and the position; the first position is `offset`.
std::vector<char> Fill(DType type, size_t count, int rank, size_t offset = 0);

// The reduction of all ranks' values.
std::vector<char> Expected(DType type, ReduceOp op, int ranks, size_t count, size_t offset = 0);

// Whether two values are equal: the same bits, or NaN both.
bool AreEqual(DType type, const char* a, const char* b);

}  // namespace tfdist::testing
