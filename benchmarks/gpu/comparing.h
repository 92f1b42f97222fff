// Times several operations in each round, so that their figures can be compared with each other.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "device/gpu.h"

namespace tfdist::benchmark {

// The extent of the measurements: the number of rounds, and the size of a large tensor in bytes.
struct Extent {
  int rounds;
  size_t bytes;
};

// A figure: the measured time of an operation, and the bytes that the operation reads and writes.
struct Figure {
  std::string name;
  size_t bytes;  // 0 if the bandwidth of the operation is meaningless.
  // The name of the figure to compare this figure with; empty if there is none.
  std::string beside = "";
};
// Prints a figure as a line of JSON.
void Print(const Figure& figure, double seconds, bool failed = false);

// An operation to time. The function `launch` adds the operation to a stream.
struct Timed {
  Figure figure;
  std::function<void()> launch;
};
// In each round, launches each operation `times` times, and measures the time until the stream has
// completed them. Prints for each operation the median time over the rounds.
void Compare(const DeviceStream& stream, const std::vector<Timed>& all, int rounds, int times);

}  // namespace tfdist::benchmark
