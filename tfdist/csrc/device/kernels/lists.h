// A bucket's tensors, and how they lie in a staging buffer: one behind the other, each from a
// multiple of 16 bytes on, so that no vector of 16 bytes holds values of two tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tfdist::device {

constexpr size_t kVectorBytes = 16;

struct alignas(16) Vector {
  uint32_t words[4];
};

// One tensor, and where its result goes: anywhere, also to the same place. At multiples of 16 bytes
// it moves by vectors.
struct Span {
  const char* in;
  char* out;
  uint64_t bytes;
  uint64_t begin;  // its first vector in the staging buffer
};

// Passed to kernels by value.
struct List {
  static constexpr uint32_t kMost = 64;
  uint32_t count;
  uint64_t vectors;  // of all
  Span spans[kMost];
};

}  // namespace tfdist::device
