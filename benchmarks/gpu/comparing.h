// Things that are timed in turns, so that one can be compared with another.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "device/gpu.h"

namespace tfdist::benchmark {

// How much is measured, and how often.
struct Extent {
  int rounds;
  size_t bytes;  // of what is large
};

// A figure, which is printed as a line of JSON.
struct Figure {
  std::string name;
  size_t bytes;             // that are read and written; 0 where that says nothing
  std::string beside = "";  // whose bytes in a second it is compared with, if any's
};
void Print(const Figure& figure, double seconds, bool failed = false);

// What a stream is given, some times in each round.
struct Timed {
  Figure figure;
  std::function<void()> launch;
};
// Prints the medians.
void Compare(const DeviceStream& stream, const std::vector<Timed>& all, int rounds, int times);

}  // namespace tfdist::benchmark
