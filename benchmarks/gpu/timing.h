// Functions that measure times.
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

// Returns how often a round must repeat an operation on `bytes` bytes. Operations on few bytes are
// repeated more often, so that the time of a round can be measured.
inline int Times(size_t bytes) {
  constexpr size_t kMax = 50, kTogether = size_t{256} << 20;
  return static_cast<int>(std::clamp<size_t>(kTogether / bytes, 1, kMax));
}

// Waits for an event in a stream. While it waits, it calls `check` repeatedly. It does not sleep
// between two checks, because the end of a sleep is less exact.
//
// If the stream takes too long, ends the program. An exception would not help, because the
// destructors free memory that the stream uses, and so would wait for the stream.
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
