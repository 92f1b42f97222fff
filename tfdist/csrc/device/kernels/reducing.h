// Reduces vectors. The results have the same bits as on the CPU: the values are reduced in the
// order of the ranks, half types in float32, and means of float32 in float64. The result is rounded
// once.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/kernels/lists.h"
#include "device/kernels/names.h"
#include "reduce/half.h"

namespace tfdist::device {
namespace {

#include "reduce/arithmetic.inc"

template <typename T>
struct Lanes {
  static constexpr uint32_t kCount = kVectorBytes / sizeof(T);
  T values[kCount];
};

// Splits a vector into its values. The vector is passed by value, so that it is loaded as a whole.
// If `memcpy` had an operand in memory, the GPU would load this operand byte by byte.
template <typename T>
Lanes<T> Split(Vector vector) {
  Lanes<T> lanes;
  std::memcpy(&lanes, &vector, sizeof(lanes));
  return lanes;
}

// Reduces kVectors vectors of the staging buffers of all ranks, and calls `put(vector, result)` for
// each result. The vectors are `step` vectors apart. All vectors of a rank are loaded before any
// result is stored, so that several loads are in flight at the same time. `S` is the type of the
// partial results.
template <typename T, typename Op, typename S, uint32_t kVectors, typename Put>
void ReduceVectors(char* const* in, uint32_t ranks, uint64_t vector, uint64_t step, double divisor,
                   Put put) {
  constexpr uint32_t kCount = Lanes<T>::kCount;
  S sums[kVectors][kCount];
  const auto read = [&](uint32_t rank, auto use) {
    Vector vectors[kVectors];
    TFDIST_UNROLL
    for (uint32_t v = 0; v < kVectors; ++v) {
      vectors[v] = reinterpret_cast<const Vector*>(in[rank])[vector + v * step];
    }
    TFDIST_UNROLL
    for (uint32_t v = 0; v < kVectors; ++v) {
      const Lanes<T> lanes = Split<T>(vectors[v]);
      TFDIST_UNROLL
      for (uint32_t i = 0; i < kCount; ++i) {
        use(static_cast<S>(Arithmetic<T>::Load(lanes.values[i])), &sums[v][i]);
      }
    }
  };
  read(0, [](S value, S* sum) { *sum = value; });
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    read(rank, [](S value, S* sum) { *sum = Op::Apply(*sum, value); });
  }
  TFDIST_UNROLL
  for (uint32_t v = 0; v < kVectors; ++v) {
    Lanes<T> result;
    TFDIST_UNROLL
    for (uint32_t i = 0; i < kCount; ++i) {
      S& sum = sums[v][i];
      if constexpr (!std::is_integral_v<S>) {
        if (divisor != 1.0) sum = sum / static_cast<S>(divisor);
      }
      Store(static_cast<typename Arithmetic<T>::Type>(sum), &result.values[i]);
    }
    Vector out;
    std::memcpy(&out, &result, sizeof(out));
    put(vector + v * step, out);
  }
}

}  // namespace
}  // namespace tfdist::device
