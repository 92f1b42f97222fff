// The encodings of `codec/codec.h`, for kernels. The half-warp of a block creates an object of an
// encoding class. The object computes the header of the block, and encodes single values. The
// static functions decode: they return the value of a code. The arithmetic is the same as on the
// CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/codec.h"
#include "codec/layout.h"
#include "reduce/half.h"

namespace tfdist::device {
namespace {

#include "codec/arithmetic.inc"

constexpr Codec Of(Encoding encoding, uint8_t bits = 8) {
  Codec codec;
  codec.encoding = encoding;
  codec.bits = bits;
  return codec;
}

struct HalfEncoding {
  static constexpr Codec kCodec = Of(Encoding::kHalf);
  using Header = float;

  template <typename Block>
  HalfEncoding(const Codec&, const Block& block) : values(HalfValues::Of(block.largest)) {}
  Header header() const { return values.up; }
  uint32_t Code(float value, uint32_t) const {
    Float16 code;
    FromFloat(values.Scaled(value), &code);
    return code.bits;
  }
  static float Value(uint32_t code, Header up) {
    return HalfValues::Value(Float16{static_cast<uint16_t>(code)}, up);
  }
  static Header NotFinite() { return BitsToFloat(kNan); }

  const HalfValues values;
};

struct Bfloat16Encoding {
  static constexpr Codec kCodec = Of(Encoding::kBfloat16);
  struct Header {};

  template <typename Block>
  Bfloat16Encoding(const Codec&, const Block&) {}
  Header header() const { return {}; }
  uint32_t Code(float value, uint32_t) const { return Bfloat16Values::Code(value).bits; }
  static float Value(uint32_t code, Header) {
    return ToFloat(Bfloat16{static_cast<uint16_t>(code)});
  }
  static Header NotFinite() { return {}; }
};

struct Float8Encoding {
  static constexpr Codec kCodec = Of(Encoding::kFloat8);
  using Header = float;

  template <typename Block>
  Float8Encoding(const Codec&, const Block& block) : values(Float8Values::Of(block.largest)) {}
  Header header() const { return values.step; }
  uint32_t Code(float value, uint32_t) const { return values.Code(value); }
  static float Value(uint32_t code, Header step) { return Float8Values::Value(code, step); }
  static Header NotFinite() { return BitsToFloat(kNan); }

  const Float8Values values;
};

template <uint8_t kBits>
struct LevelsEncoding {
  static constexpr Codec kCodec = Of(Encoding::kLevels, kBits);
  using Header = float;

  template <typename Block>
  LevelsEncoding(const Codec& codec, const Block& block) : stochastic(codec.stochastic) {
    float largest = BitsToFloat(block.largest);
    const auto sum = [&](auto term) {
      return block.Sum([&](float value) { return term(Limited(value, limit)); });
    };
    if (codec.clip > 0) {
      const float most = codec.clip * Norm(largest, static_cast<float>(block.count), sum);
      if (most < largest) limit = largest = most;
    }
    values = LevelsValues::Of(kBits, codec.euclidean ? Norm(largest, 1, sum) : largest);
  }
  Header header() const { return values.step; }
  uint32_t Code(float value, uint32_t number) const {
    return values.Code(Limited(value, limit), stochastic ? Share(Random(number)) : 0.5f);
  }
  static float Value(uint32_t code, Header step) { return LevelsValues::Value(code, kBits, step); }
  static Header NotFinite() { return BitsToFloat(kNan); }

  const bool stochastic;
  float limit = BitsToFloat(kInfinity);
  LevelsValues values;
};

struct PowersEncoding {
  static constexpr Codec kCodec = Of(Encoding::kPowers);
  using Header = int32_t;

  template <typename Block>
  PowersEncoding(const Codec&, const Block& block) : values(PowersValues::Of(block.largest)) {}
  Header header() const { return values.top; }
  uint32_t Code(float value, uint32_t number) const { return values.Code(value, Random(number)); }
  static float Value(uint32_t code, Header top) {
    return top < 0 ? BitsToFloat(kNan) : PowersValues::Value(static_cast<int>(code), top);
  }
  static Header NotFinite() { return -1; }

  const PowersValues values;
};

struct MeansEncoding {
  static constexpr Codec kCodec = Of(Encoding::kTwoMeans);
  using Header = TwoMeansValues;

  template <typename Block>
  MeansEncoding(const Codec&, const Block& block)
      : values(TwoMeansValues::Of(block.count, [&block](auto term) { return block.Sum(term); })) {}
  Header header() const { return values; }
  uint32_t Code(float value, uint32_t) const { return TwoMeansValues::Code(value); }
  static float Value(uint32_t code, Header means) {
    return TwoMeansValues::Value(code, means.negative, means.positive);
  }
  static Header NotFinite() { return {BitsToFloat(kNan), BitsToFloat(kNan)}; }

  const TwoMeansValues values;
};

struct SignsEncoding {
  static constexpr Codec kCodec = Of(Encoding::kSigns);
  using Header = float;

  template <typename Block>
  SignsEncoding(const Codec& codec, const Block& block)
      : values(SignsValues::Of(codec.unit, block.largest, block.count,
                               [&block](auto term) { return block.Sum(term); })) {}
  Header header() const { return values.magnitude; }
  uint32_t Code(float value, uint32_t) const { return SignsValues::Code(value); }
  static float Value(uint32_t code, Header magnitude) {
    return SignsValues::Value(code, magnitude);
  }
  static Header NotFinite() { return BitsToFloat(kNan); }

  const SignsValues values;
};

}  // namespace
}  // namespace tfdist::device
