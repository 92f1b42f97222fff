// Reduces vectors. The results are bitwise identical to the results on the CPU. To ensure this, the
// values are reduced in the order of the ranks. Values of half types are reduced in float32, and
// means of float32 values are computed in float64. Only the final result is rounded to the type of
// the values.
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

// Splits a vector into its values. The vector is passed by value, so that the GPU loads it as a
// whole. If `memcpy` read the vector directly from memory, the GPU would load it byte by byte.
template <typename T>
Lanes<T> Split(Vector vector) {
  Lanes<T> lanes;
  std::memcpy(&lanes, &vector, sizeof(lanes));
  return lanes;
}

// Reduces kVectors vectors over all ranks. The indices of these vectors are `vector`, `vector +
// step`, `vector + 2 * step`, and so on. Calls `put(index, result)` for each of them. All vectors
// of a rank are loaded before the first of them is reduced, so that several loads are in flight at
// the same time.
// Args: S: the type of the partial results; in: the staging buffer of each rank.
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
