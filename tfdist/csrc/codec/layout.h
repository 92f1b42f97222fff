// The layout of an encoded block: the header, then the codes.
//
// The codes of a block are in planes, so that packing them takes no shuffling: with p codes in a
// byte, byte k holds the codes of the values k, k + plane, k + 2 plane, and so on.
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
