// A bucket's tensors and their layout in a staging buffer: consecutive, each aligned to 16 bytes,
// so that no vector of 16 bytes holds values of two tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tfdist::device {

constexpr size_t kVectorBytes = 16;

struct alignas(16) Vector {
  uint32_t words[4];
};

// A tensor and its destination, which may be the tensor itself. Addresses that are multiples of 16
// bytes allow moves by vectors.
struct Span {
  const char* in;
  char* out;
  uint64_t bytes;
  uint64_t begin;  // index of its first vector in the staging buffer
};

// Passed to kernels by value.
struct List {
  static constexpr uint32_t kMax = 64;
  uint32_t count;
  uint64_t vectors;  // of all tensors
  Span spans[kMax];
};

}  // namespace tfdist::device
