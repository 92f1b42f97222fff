// The layout of an encoded block: the header, followed by the codes.
//
// Several codes with fewer than 8 bits share a byte. Let p = 8 / bits be the number of codes in a
// byte, and let `plane` be the size of all codes of the block in bytes. Then byte k contains the p
// codes of the values k, k + plane, k + 2 * plane, and so on. Consecutive values therefore have
// their codes in consecutive bytes, and packing the codes does not require shuffle instructions.
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
