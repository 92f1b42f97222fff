// Every encoding of the codecs: bounds of its error, its randomness, values that are not finite,
// and agreement of all vector units.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "codec/codec.h"
#include "codec/units.h"
#include "cpp/ranks.h"
#include "vector_unit.h"

namespace tfdist::testing {
namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();

struct Known {
  const char* name;
  Codec codec;
  bool unbiased;
  // The largest error of a value, relative to its block's largest magnitude; 0 if only the average
  // is bounded.
  float bound;
};

std::vector<Known> All() {
  const auto make = [](Encoding encoding) {
    Codec codec;
    codec.encoding = encoding;
    return codec;
  };
  Codec int8 = make(Encoding::kLevels), random8 = int8, four = int8, ternary = int8, norm = int8;
  random8.stochastic = four.stochastic = ternary.stochastic = norm.stochastic = true;
  four.bits = norm.bits = 4;
  norm.euclidean = true;
  ternary.bits = 2;
  ternary.block = 512;
  Codec votes = make(Encoding::kSigns);
  votes.unit = true;
  return {{"half", make(Encoding::kHalf), false, 0x1p-11f},
          {"bfloat16", make(Encoding::kBfloat16), false, 0x1p-8f},
          {"float8", make(Encoding::kFloat8), false, 0x1p-4f},
          {"int8", int8, false, 0.5f / 127 * 1.001f},
          {"int8 at random", random8, true, 1.001f / 127},
          {"int4 at random", four, true, 1.001f / 7},
          {"ternary", ternary, true, 1.001f},
          {"norm", norm, true, 0},
          {"powers", make(Encoding::kPowers), true, 1.0f},
          {"means", make(Encoding::kTwoMeans), false, 0},
          {"signs", make(Encoding::kSigns), false, 0},
          {"votes", votes, false, 0}};
}

std::vector<float> Normal(size_t count, float scale, unsigned seed = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

std::vector<uint8_t> Encoded(const Codec& codec, const std::vector<float>& values,
                             std::vector<float>* error = nullptr, uint32_t seed = 7) {
  // One byte more, which must not change.
  std::vector<uint8_t> bytes(EncodedBytes(codec, values.size()) + 1, 0x5a);
  Encode(codec,
         {values.data(), error ? error->data() : nullptr, values.size(), bytes.data(), seed});
  EXPECT(bytes.back() == 0x5a);
  return bytes;
}

std::vector<float> Decoded(const Codec& codec, const std::vector<uint8_t>& bytes, size_t count) {
  std::vector<float> values(count + 1, 42.0f);
  Decode(codec, {bytes.data(), count, values.data(), false});
  EXPECT(values.back() == 42.0f);
  values.pop_back();
  return values;
}

std::vector<float> There(const Codec& codec, const std::vector<float>& values,
                         std::vector<float>* error = nullptr, uint32_t seed = 7) {
  return Decoded(codec, Encoded(codec, values, error, seed), values.size());
}

void CheckBounds(const Known& known) {
  for (const float scale : {1.0f, 1e-30f, 1e30f, 3e-5f}) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{256}, size_t{1003}}) {
      const std::vector<float> values = Normal(count, scale);
      const std::vector<float> back = There(known.codec, values);
      for (size_t i = 0; i < count; ++i) {
        EXPECT(std::isfinite(back[i]));
        if (known.bound == 0) continue;
        float largest = 0;
        const size_t begin = i / known.codec.block * known.codec.block;
        for (size_t k = begin; k < std::min<size_t>(count, begin + known.codec.block); ++k) {
          largest = std::max(largest, std::fabs(values[k]));
        }
        EXPECT(std::fabs(back[i] - values[i]) <= known.bound * largest);
      }
    }
  }
}

void CheckZeros(const Known& known) {
  for (const float value : {0.0f, -0.0f, std::numeric_limits<float>::denorm_min()}) {
    for (const float back : There(known.codec, std::vector<float>(300, value))) {
      EXPECT(std::fabs(back) <= (known.codec.unit ? 1.0f : 1e-37f));
      if (value == 0) EXPECT(back == 0);
    }
  }
}

// The mean of many encodings approaches the values as fast as the mean of independent ones.
void CheckUnbiased(const Known& known) {
  if (!known.unbiased) return;
  constexpr int kTimes = 4000;
  const std::vector<float> values = Normal(64, 1);
  std::vector<double> sum(values.size()), squares(values.size());
  for (uint32_t time = 0; time < kTimes; ++time) {
    const std::vector<float> back = There(known.codec, values, nullptr, time);
    for (size_t i = 0; i < values.size(); ++i) {
      sum[i] += back[i];
      squares[i] += double{back[i]} * back[i];
    }
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const double mean = sum[i] / kTimes;
    const double deviation = std::sqrt(std::max(0.0, squares[i] / kTimes - mean * mean) / kTimes);
    // A rarely rounded-up value may by chance never have been rounded up.
    EXPECT(std::fabs(mean - values[i]) <= 5 * deviation + 10.0 / kTimes);
  }
}

void CheckErrors(const Known& known) {
  const std::vector<float> values = Normal(1003, 1);
  std::vector<float> error = Normal(1003, 0.1f, 2), before = error;
  const std::vector<float> back = There(known.codec, values, &error);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT(std::fabs(back[i] + error[i] - (values[i] + before[i])) <= 1e-6f);
  }
}

void CheckNotFinite(const Known& known) {
  for (const float bad : {kInfinite, -kInfinite, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> values = Normal(3 * known.codec.block, 1);
    values[known.codec.block + 3] = bad;
    std::vector<float> error = Normal(values.size(), 0.1f, 2), before = error;
    const std::vector<float> back = There(known.codec, values, &error);
    for (size_t i = 0; i < values.size(); ++i) {
      const bool inside = i / known.codec.block == 1;
      EXPECT(inside == std::isnan(back[i]));
      EXPECT(std::isfinite(error[i]));
      if (inside) EXPECT(error[i] == before[i]);
    }
  }
  const std::vector<float> huge(300, std::numeric_limits<float>::max());
  for (const float back : There(known.codec, huge)) EXPECT(std::isfinite(back));
}

template <typename EncodeOn, typename DecodeOn>
void CheckUnit(const Known& known, EncodeOn encode, DecodeOn decode) {
  const std::vector<float> values = Normal(1003, 1);
  const std::vector<uint8_t> bytes = Encoded(known.codec, values);
  std::vector<float> back(values.size());
  decode(known.codec, DecodeArgs{bytes.data(), values.size(), back.data(), false});
  EXPECT(back == Decoded(known.codec, bytes, values.size()));
  std::vector<uint8_t> others(bytes.size(), 0x5a);
  encode(known.codec, EncodeArgs{values.data(), nullptr, values.size(), others.data(), 7});
  // A norm or a mean may differ in its last bit.
  const std::vector<float> far = Decoded(known.codec, others, values.size());
  size_t apart = 0;
  for (size_t i = 0; i < values.size(); ++i) apart += std::fabs(far[i] - back[i]) > 1e-5f;
  EXPECT(apart <= 2);
}

void CheckUnits(const Known& known) {
  CheckUnit(known, EncodeOnBaseline, DecodeOnBaseline);
#if defined(__x86_64__)
  if (FindVectorUnit() != VectorUnit::kBaseline) CheckUnit(known, EncodeOnAvx2, DecodeOnAvx2);
#endif
}

// A peer may send any bytes.
void CheckGarbage(const Known& known) {
  std::mt19937 engine(3);
  for (int time = 0; time < 200; ++time) {
    std::vector<uint8_t> bytes(EncodedBytes(known.codec, 1003));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(engine());
    Decoded(known.codec, bytes, 1003);
  }
}

// The values of a float8, and the ties between them.
void CheckFloat8() {
  Codec codec;
  codec.encoding = Encoding::kFloat8;
  std::vector<float> held = {448};
  for (int exponent = -9; exponent < 9; ++exponent) {
    for (int eighth = 0; eighth < 8; ++eighth) {
      const float value = std::ldexp(1 + static_cast<float>(eighth) / 8, exponent);
      const bool denormal = value < 0x1p-6f;
      if (value <= 448 && (!denormal || std::fmod(value, 0x1p-9f) == 0)) held.push_back(value);
    }
  }
  held.resize(std::min<size_t>(held.size(), codec.block));
  EXPECT(There(codec, held) == held);
  EXPECT((There(codec, {448, 1.0625f, 1.1875f, -17, 0x1.8p-9f}) ==
          std::vector<float>{448, 1, 1.25f, -16, 0x1p-8f}));
}

void CheckRules() {
  const auto refuses = [](auto change) {
    Codec codec;
    change(codec);
    try {
      CheckCodec(codec);
    } catch (const Error& error) { return error.code() == Code::kInvalidArgument; }
    return false;
  };
  EXPECT(refuses([](Codec& c) { c.bits = 3; }));
  EXPECT(refuses([](Codec& c) { c.block = 0; }));
  EXPECT(refuses([](Codec& c) { c.block = 12; }));
  EXPECT(refuses([](Codec& c) { c.block = 8192; }));
  EXPECT(refuses([](Codec& c) { c.encoding = static_cast<Encoding>(99); }));
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  try {
    for (const Known& known : All()) {
      try {
        CheckBounds(known);
        CheckZeros(known);
        CheckUnbiased(known);
        CheckErrors(known);
        CheckNotFinite(known);
        CheckUnits(known);
        CheckGarbage(known);
      } catch (const Failure& failure) {
        throw Failure(std::string(known.name) + ": " + failure.what());
      }
      std::printf("%s: ok\n", known.name);
    }
    CheckFloat8();
    CheckRules();
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
