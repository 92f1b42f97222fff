// Reduces vectors as the processor's code does, to the same bits: in the order of the ranks, half
// types in float32 and means of float32 in float64, rounded once.
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

// Takes a copy, which is loaded at once: what `memcpy` reads from memory itself, GPUs load byte by byte.
template <typename T>
Lanes<T> Split(Vector vector) {
  Lanes<T> lanes;
  std::memcpy(&lanes, &vector, sizeof(lanes));
  return lanes;
}

// The same vector of each rank's staging buffer. `S` is the type of the partial results.
template <typename T, typename Op, typename S>
Vector ReduceVector(char* const* in, uint32_t ranks, uint64_t vector, double divisor) {
  constexpr uint32_t kCount = Lanes<T>::kCount;
  S sums[kCount];
  const auto read = [&](uint32_t rank) {
    return Split<T>(reinterpret_cast<const Vector*>(in[rank])[vector]);
  };
  const Lanes<T> first = read(0);
TFDIST_UNROLL
  for (uint32_t i = 0; i < kCount; ++i) {
    sums[i] = static_cast<S>(Arithmetic<T>::Load(first.values[i]));
  }
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    const Lanes<T> next = read(rank);
TFDIST_UNROLL
    for (uint32_t i = 0; i < kCount; ++i) {
      sums[i] = Op::Apply(sums[i], static_cast<S>(Arithmetic<T>::Load(next.values[i])));
    }
  }
  Lanes<T> result;
TFDIST_UNROLL
  for (uint32_t i = 0; i < kCount; ++i) {
    if constexpr (!std::is_integral_v<S>) {
      if (divisor != 1.0) sums[i] = sums[i] / static_cast<S>(divisor);
    }
    Store(static_cast<typename Arithmetic<T>::Type>(sums[i]), &result.values[i]);
  }
  Vector out;
  std::memcpy(&out, &result, sizeof(out));
  return out;
}

}  // namespace
}  // namespace tfdist::device
