// Lossy encodings of float32 values, for gradients that are sent over slow links.
//
// Values are encoded block by block. An encoded block consists of a short header, followed by a
// code of 1 to 16 bits for each value. If a block contains a value that is not finite, all values
// of the block decode to NaN.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tfdist {

enum class Encoding : uint8_t {
  // float16. The block is first multiplied by a power of two, so that its values fit the range of
  // float16.
  kHalf,
  kBfloat16,  // bfloat16, without a header
  // A float of 8 bits, with 4 bits of exponent and 3 bits of mantissa ("e4m3fn"). The block is
  // first scaled so that its largest magnitude becomes 448.
  kFloat8,
  // A sign, and one of 2^(bits - 1) evenly spaced levels from 0 to the scale.
  kLevels,
  // A sign and a power of two. The value is rounded up or down at random, without bias.
  kPowers,
  // 1 bit: whether the value is negative. The value decodes to the mean of all negative values of
  // the block, or to the mean of all other values.
  kTwoMeans,
  // 1 bit: whether the value is negative. All values of the block decode to the same magnitude.
  kSigns,
};
constexpr int kEncodings = 7;

struct Codec {
  Encoding encoding = Encoding::kLevels;
  // For kLevels: the number of bits per value, which is 2, 4 or 8.
  uint8_t bits = 8;
  // For kLevels: whether values are rounded up or down at random, without bias, instead of to the
  // nearest level.
  bool stochastic = false;
  // For kLevels: whether the scale is the Euclidean norm of the block instead of its largest
  // magnitude.
  bool euclidean = false;
  // For kSigns: whether values decode to the magnitude 1 instead of the mean magnitude. A sum of
  // such values is then replaced with its sign.
  bool unit = false;
  // For kLevels: magnitudes are limited to this multiple of the block's root mean square. 0 means
  // that they are not limited.
  float clip = 0;
  // The number of values in a block: a multiple of 8, at most kMaxBlock.
  uint32_t block = 256;
};
constexpr uint32_t kMaxBlock = 4096;

// Throws Error(kInvalidArgument) if the codec is invalid. The message states the violated rule.
void CheckCodec(const Codec& codec);

// Makes a codec from numbers that may be out of range. Throws Error(kInvalidArgument) like
// CheckCodec.
Codec MakeCodec(int64_t encoding, int64_t bits, bool stochastic, bool euclidean, bool unit,
                float clip, int64_t block);

// Returns a hash of the codec. It is never 0, and almost certainly differs between different
// codecs.
uint32_t HashOf(const Codec& codec);

// Returns the size of `count` encoded values, in bytes.
size_t EncodedBytes(const Codec& codec, size_t count);

struct EncodeArgs {
  const float* in;
  // The residual of error feedback. `Encode` adds it to `in` before encoding, and then replaces it
  // with the encoding error. In blocks with values that are not finite, it remains unchanged. Null
  // if there is no error feedback.
  float* error;
  size_t count;
  uint8_t* out;
  uint32_t seed;  // seed for stochastic rounding
};
void Encode(const Codec& codec, const EncodeArgs& args);

struct DecodeArgs {
  const uint8_t* in;
  size_t count;
  float* out;
  bool add;  // whether to add to `out` instead of overwriting it
};
// Decodes values. Without `add`, the results have the same bits on every processor.
void Decode(const Codec& codec, const DecodeArgs& args);

}  // namespace tfdist
