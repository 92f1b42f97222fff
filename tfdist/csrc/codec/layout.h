// The layout of an encoded block: the header, followed by the codes.
//
// The codes of a block are stored in planes, so that packing them does not require shuffle
// instructions. Let p be the number of codes in a byte, and `plane` the number of bytes with codes.
// Then byte k holds the p codes of the values k, k + plane, k + 2 * plane, and so on.
#pragma once

#include "codec/codec.h"

namespace tfdist {
namespace {

constexpr size_t HeaderBytes(const Codec& codec) {
  switch (codec.encoding) {
    case Encoding::kBfloat16:
      return 0;
    case Encoding::kTwoMeans:
      return 8;
    default:
      return 4;
  }
}

constexpr size_t BitsOf(const Codec& codec) {
  switch (codec.encoding) {
    case Encoding::kHalf:
    case Encoding::kBfloat16:
      return 16;
    case Encoding::kFloat8:
    case Encoding::kPowers:
      return 8;
    case Encoding::kLevels:
      return codec.bits;
    default:
      return 1;
  }
}

constexpr size_t PayloadBytes(size_t bits, size_t count) { return (count * bits + 7) / 8; }

constexpr size_t BlockBytes(const Codec& codec, size_t count) {
  return HeaderBytes(codec) + PayloadBytes(BitsOf(codec), count);
}

}  // namespace
}  // namespace tfdist
