// What each rank of a test brings, and what must come of it.
#pragma once

#include <cstddef>
#include <vector>

#include "types.h"

namespace tfdist::testing {

// Small integers that depend on the rank and the position; the first of them is at `offset`.
std::vector<char> Fill(DType type, size_t count, int rank, size_t offset = 0);

// The same of all ranks, reduced.
std::vector<char> Expected(DType type, ReduceOp op, int ranks, size_t count, size_t offset = 0);

// Whether two values are the same: the same bits, or no number both.
bool AreEqual(DType type, const char* a, const char* b);

}  // namespace tfdist::testing
