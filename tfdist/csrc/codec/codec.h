// Lossy encodings of float32 values. They reduce the size of gradients that are sent over slow
// links.
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
  // A sign, and one of 2^(bits - 1) evenly spaced magnitudes. The largest of these magnitudes is
  // the block's scale, and the smallest is 0.
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
  // For kLevels: whether the block's scale is its Euclidean norm instead of its largest magnitude.
  bool euclidean = false;
  // For kSigns: whether all values decode to 1 or -1, instead of the block's mean magnitude with a
  // sign. An all-reduce with such a codec is a majority vote: each sum of signs is replaced with
  // the sign of the sum.
  bool unit = false;
  // For kLevels: the largest allowed magnitude, as a multiple of the block's root mean square.
  // Larger magnitudes are clipped. 0 means that no magnitude is clipped.
  float clip = 0;
  // The number of values in a block: a multiple of 8, at most kMaxBlock.
  uint32_t block = 256;
};
constexpr uint32_t kMaxBlock = 4096;

// Throws Error(kInvalidArgument) if the codec is invalid. The message says which rule the codec
// violates.
void CheckCodec(const Codec& codec);

// Returns a codec with these settings. Throws Error(kInvalidArgument) if a number is out of range,
// or if `CheckCodec` rejects the codec.
Codec MakeCodec(int64_t encoding, int64_t bits, bool stochastic, bool euclidean, bool unit,
                float clip, int64_t block);

// Returns a hash of the codec. Different codecs almost certainly have different hashes. The hash is
// never 0, because 0 stands for an operation without compression (types.h).
uint32_t HashOf(const Codec& codec);

// Returns the size of `count` encoded values, in bytes.
size_t EncodedBytes(const Codec& codec, size_t count);

struct EncodeArgs {
  const float* in;
  // The residual of error feedback, or null if error feedback is not used. `Encode` adds the
  // residual to `in` before encoding, and then replaces the residual with the encoding error. If a
  // block contains a value that is not finite, the residual of this block remains unchanged.
  float* error;
  size_t count;
  uint8_t* out;
  uint32_t seed;  // the seed for stochastic rounding
};
void Encode(const Codec& codec, const EncodeArgs& args);

struct DecodeArgs {
  const uint8_t* in;
  size_t count;
  float* out;
  // Whether to add the decoded values to `out` instead of overwriting `out`.
  bool add;
};
// Decodes values. The results have the same bits on every processor.
void Decode(const Codec& codec, const DecodeArgs& args);

}  // namespace tfdist
