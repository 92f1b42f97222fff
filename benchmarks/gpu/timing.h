// How long things take.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "device/gpu.h"

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
  constexpr size_t kMax = 50, kTogether = size_t{256} << 20;
  return static_cast<int>(std::clamp<size_t>(kTogether / bytes, 1, kMax));
}

// Waits until a point in a stream has passed; without sleep, which would be less exact. What never
// comes to an end ends the program, since to free what it uses would wait for it.
inline void AwaitExactly(const DeviceEvent& event, const std::function<void()>& check = {}) {
  constexpr double kSeconds = 60;
  const double end = Now() + kSeconds;
  while (!event.HasPassed()) {
    std::this_thread::yield();
    if (check) check();
    if (Now() < end) continue;
    std::fprintf(stderr, "A GPU has not come to an end within %.0f s.\n", kSeconds);
    std::_Exit(1);
  }
}

}  // namespace tfdist::benchmark
