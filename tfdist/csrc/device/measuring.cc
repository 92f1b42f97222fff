#include "device/measuring.h"

#include <chrono>

namespace tfdist {
namespace {

using Clock = std::chrono::steady_clock;

// About so long it may take; what is larger than what has been tried by then is the second's.
constexpr double kMostSeconds = 1.0;
// A way that takes so many times as long will not catch up with larger sizes.
constexpr double kLost = 2.0;
constexpr size_t kStep = 4;  // from one size to the next

}  // namespace

std::vector<size_t> TriedSizes() {
  std::vector<size_t> sizes;
  for (size_t bytes = size_t{4} << 10; bytes <= size_t{16} << 20; bytes *= kStep) {
    sizes.push_back(bytes);
  }
  return sizes;
}

size_t WhereFirstIsFaster(
    const std::function<double(bool first, size_t bytes)>& seconds,
    const std::function<std::vector<double>(const std::vector<double>&)>& slowest) {
  const auto begin = Clock::now();
  size_t most = 0;
  for (const size_t bytes : TriedSizes()) {
    const double own_first = seconds(true, bytes), own_second = seconds(false, bytes);
    const double spent = std::chrono::duration<double>(Clock::now() - begin).count();
    const std::vector<double> all = slowest({own_first, own_second, spent});
    // Half way to the next size.
    if (all[0] < all[1]) most = bytes * kStep / 2;
    if (all[0] > kLost * all[1] || all[2] > kMostSeconds) break;
  }
  return most;
}

}  // namespace tfdist
