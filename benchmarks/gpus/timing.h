// How long things take.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace tfdist::benchmark {

inline double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// How often something of so many bytes is done in one round, so that it takes a while.
inline int Times(size_t bytes) {
  constexpr size_t kMost = 50, kTogether = size_t{256} << 20;
  return static_cast<int>(std::clamp<size_t>(kTogether / bytes, 1, kMost));
}

}  // namespace tfdist::benchmark
