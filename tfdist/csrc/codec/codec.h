// Lossy encodings of float32 values, for gradients on slow links.
//
// Each block of values is encoded separately: a header of a few bytes, then a few bits per value. A
// block with a value that is not finite decodes to NaN entirely.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tfdist {

enum class Encoding : uint8_t {
  kHalf,      // float16, scaled by a power of two, so that nothing overflows or vanishes
  kBfloat16,  // bfloat16; no header
  kFloat8,    // 8 bits with 4 of exponent and 3 of mantissa ("e4m3fn"), scaled
  kLevels,    // sign and one of 2^(bits - 1) even steps from 0 to the scale
  kPowers,    // sign and a power of two, rounded at random: unbiased
  kTwoMeans,  // whether a value is negative; decoded to the mean of the values of its sign
  kSigns,     // whether a value is negative; decoded to one common magnitude
};
constexpr int kEncodings = 7;

struct Codec {
  Encoding encoding = Encoding::kLevels;
  uint8_t bits = 8;         // of kLevels: 2, 4 or 8
  bool stochastic = false;  // kLevels: rounded up or down at random, unbiased, not to the nearest
  bool euclidean = false;   // kLevels: the scale is the block's norm, not its largest magnitude
  bool unit = false;     // kSigns: the magnitude is 1, not the mean; a sum is reduced to its sign
  float clip = 0;        // kLevels: larger values become this many root mean squares; 0: none
  uint32_t block = 256;  // values in a block: a multiple of 8, at most kMaxBlock
};
constexpr uint32_t kMaxBlock = 4096;

// Throws Error(kInvalidArgument) with the violated rule.
void CheckCodec(const Codec& codec);

// Makes a codec from unchecked numbers. Throws like CheckCodec.
Codec MakeCodec(int64_t encoding, int64_t bits, bool stochastic, bool euclidean, bool unit,
                float clip, int64_t block);

// A hash that is never 0 and almost surely differs between codecs.
uint32_t HashOf(const Codec& codec);

// The encoded size of `count` values, in bytes.
size_t EncodedBytes(const Codec& codec, size_t count);

struct EncodeArgs {
  const float* in;
  // Added to `in` before encoding, then replaced by the encoding error; null for none. It does not
  // change in blocks with values that are not finite.
  float* error;
  size_t count;
  uint8_t* out;
  uint32_t seed;  // seed of stochastic rounding
};
void Encode(const Codec& codec, const EncodeArgs& args);

struct DecodeArgs {
  const uint8_t* in;
  size_t count;
  float* out;
  bool add;  // adds to `out` instead of overwriting it
};
// Decodes values: to the same bits on every processor, except with `add`.
void Decode(const Codec& codec, const DecodeArgs& args);

}  // namespace tfdist
