// Which of two ways is the faster one for all-reduces of each size, by trying.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace tfdist {

// The sizes that are tried, ascending.
std::vector<size_t> TriedSizes();

// Up to how many bytes the first way is faster; 0 if it never is.
// Args:
//   seconds: how long an all-reduce of so many bytes takes by the first way, or by the second.
//   slowest: the same numbers, each the largest of all ranks; so that all come to one result.
size_t WhereFirstIsFaster(
    const std::function<double(bool first, size_t bytes)>& seconds,
    const std::function<std::vector<double>(const std::vector<double>&)>& slowest);

}  // namespace tfdist
