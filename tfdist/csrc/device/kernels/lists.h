// The tensors of a bucket, and their layout in a staging buffer. In the buffer, the tensors follow
// each other, and each tensor begins at a multiple of 16 bytes. A vector of 16 bytes therefore
// never contains values of two tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tfdist::device {

constexpr size_t kVectorBytes = 16;

struct alignas(16) Vector {
  uint32_t words[4];
};

// A tensor and the address of its result, which may be the address of the tensor itself. If an
// address is a multiple of 16, kernels access the memory there in vectors of 16 bytes. Otherwise,
// they access it byte by byte.
struct Span {
  const char* in;
  char* out;
  uint64_t bytes;
  uint64_t begin;  // the index of the tensor's first vector in the staging buffer
};

// A list of tensors, which is passed to kernels by value.
struct List {
  static constexpr uint32_t kMax = 64;
  uint32_t count;
  uint64_t vectors;  // the number of vectors of all tensors together
  Span spans[kMax];
};

}  // namespace tfdist::device
