// Conversions between float32 and the half types float16 and bfloat16. They round to nearest, ties
// to even. All functions have internal linkage, so each including file gets its own copy of the
// code. This is necessary because the files are compiled for different vector units.
#pragma once

#include <cstdint>
#include <cstring>

namespace tfdist {
namespace {

inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct Bfloat16 {
  uint16_t bits;
};

inline float ToFloat(Bfloat16 value) { return BitsToFloat(uint32_t{value.bits} << 16); }

inline void FromFloat(float value, Bfloat16* out) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  // If a NaN were rounded like other values, it could become infinity. NaNs are therefore handled
  // separately.
  out->bits = static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40 : rounded >> 16);
}

struct Float16 {
  uint16_t bits;
};

// Converts a half to a float by a multiplication, which adjusts the exponent and also normalizes
// denormal numbers.
inline float ToFloat(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{value.bits & 0x7fffu} << 13;
  const float scaled = BitsToFloat(magnitude) * BitsToFloat(0x77800000);  // 2^112
  const uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000u : 0u;    // infinity or NaN
  return BitsToFloat(FloatToBits(scaled) | special | sign);
}

inline void FromFloat(float value, Float16* out) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x47800000) {  // infinity, NaN, or at least 65536, which becomes infinity
    half = magnitude > 0x7f800000 ? 0x7e00u : 0x7c00u;
  } else if (magnitude < 0x38800000) {  // the result is a denormal half; the addition rounds it
    half = FloatToBits(BitsToFloat(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

}  // namespace
}  // namespace tfdist
