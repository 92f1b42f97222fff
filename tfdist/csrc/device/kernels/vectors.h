// Loads and stores the tensors of a list, one vector at a time.
#pragma once

#include <cstring>

#include "device/kernels/execution.h"
#include "device/kernels/lists.h"

namespace tfdist::device {

// Returns the tensor that contains the vector with index `vector`.
inline const Span& Find(const List& list, uint64_t vector) {
  uint32_t first = 0, behind = list.count;
  while (behind - first > 1) {
    const uint32_t middle = (first + behind) / 2;
    if (list.spans[middle].begin <= vector) {
      first = middle;
    } else {
      behind = middle;
    }
  }
  return list.spans[first];
}

// Returns whether a vector can be loaded or stored with a single instruction. This requires that
// the tensor is aligned, and that the whole vector is within the tensor.
// Args: data: the input or the output of the span; offset: the offset of the vector in the tensor,
// in bytes.
inline bool IsWhole(const Span& span, const char* data, uint64_t offset) {
  const bool aligned = reinterpret_cast<uint64_t>(data) % kVectorBytes == 0;
  return aligned && offset + kVectorBytes <= span.bytes;
}

// Returns the vector with index `vector`. If the tensor ends within this vector, the remaining
// bytes of the vector are 0.
inline Vector LoadVector(const List& list, uint64_t vector) {
  const Span& span = Find(list, vector);
  const uint64_t offset = (vector - span.begin) * kVectorBytes;
  if (IsWhole(span, span.in, offset)) return *reinterpret_cast<const Vector*>(span.in + offset);
  Vector value{};
  TFDIST_UNROLL
  for (uint32_t i = 0; i < kVectorBytes; ++i) {
    if (offset + i >= span.bytes) continue;
    const uint32_t byte = static_cast<uint8_t>(span.in[offset + i]);
    value.words[i / 4] |= byte << (i % 4 * 8);
  }
  return value;
}

inline void StoreVector(const List& list, uint64_t vector, const Vector& value) {
  const Span& span = Find(list, vector);
  const uint64_t offset = (vector - span.begin) * kVectorBytes;
  if (IsWhole(span, span.out, offset)) {
    *reinterpret_cast<Vector*>(span.out + offset) = value;
    return;
  }
  TFDIST_UNROLL
  for (uint32_t i = 0; i < kVectorBytes; ++i) {
    if (offset + i >= span.bytes) continue;
    span.out[offset + i] = static_cast<char>(value.words[i / 4] >> (i % 4 * 8));
  }
}

}  // namespace tfdist::device
