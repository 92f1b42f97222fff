#include "codec/codec.h"

#include <cstring>
#include <string>

#include "codec/layout.h"
#include "codec/units.h"
#include "error.h"
#include "vector_unit.h"

namespace tfdist {
namespace {

struct Unit {
  void (*encode)(const Codec&, const EncodeArgs&);
  void (*decode)(const Codec&, const DecodeArgs&);
};

Unit Choose() {
#if defined(__x86_64__)
  switch (FindVectorUnit()) {
    case VectorUnit::kAvx512:
      return {EncodeOnAvx512, DecodeOnAvx512};
    case VectorUnit::kAvx2:
      return {EncodeOnAvx2, DecodeOnAvx2};
    case VectorUnit::kBaseline:
      break;
  }
#endif
  return {EncodeOnBaseline, DecodeOnBaseline};
}

const Unit& Chosen() {
  static const Unit unit = Choose();
  return unit;
}

[[noreturn]] void Refuse(const std::string& rule, uint32_t received) {
  throw Error(Code::kInvalidArgument, rule + " Received: " + std::to_string(received) + ".");
}

}  // namespace

void CheckCodec(const Codec& codec) {
  if (static_cast<int>(codec.encoding) >= kEncodings) {
    Refuse("A codec needs a known encoding.", static_cast<uint32_t>(codec.encoding));
  }
  if (codec.bits != 2 && codec.bits != 4 && codec.bits != 8) {
    Refuse("A codec must have 2, 4 or 8 bits per value.", codec.bits);
  }
  if (codec.block == 0 || codec.block % 8 != 0 || codec.block > kMaxBlock) {
    Refuse("A codec's block must be a multiple of 8 values, at most 4096.", codec.block);
  }
}

Codec MakeCodec(int64_t encoding, int64_t bits, bool stochastic, bool euclidean, bool unit,
                float clip, int64_t block) {
  // A number that does not fit in its field is replaced with a value that `CheckCodec` rejects. If
  // it were only truncated, the result could look valid.
  const auto small = [](int64_t number) {
    return static_cast<uint8_t>(number < 0 || number > 255 ? 255 : number);
  };
  Codec codec;
  codec.encoding = static_cast<Encoding>(small(encoding));
  codec.bits = small(bits);
  codec.stochastic = stochastic;
  codec.euclidean = euclidean;
  codec.unit = unit;
  codec.clip = clip;
  codec.block = block < 0 || block > kMaxBlock ? kMaxBlock + 1 : static_cast<uint32_t>(block);
  CheckCodec(codec);
  return codec;
}

uint32_t HashOf(const Codec& codec) {
  uint32_t clip;
  std::memcpy(&clip, &codec.clip, sizeof(clip));
  const uint32_t flags = codec.stochastic | codec.euclidean << 1 | codec.unit << 2;
  uint32_t hash = 1;
  for (const uint32_t field :
       {static_cast<uint32_t>(codec.encoding), uint32_t{codec.bits}, flags, clip, codec.block}) {
    hash = (hash ^ field) * 0x01000193u + 0x9e3779b9u;
  }
  return hash | 1;
}

size_t EncodedBytes(const Codec& codec, size_t count) {
  const size_t rest = count % codec.block;
  return count / codec.block * BlockBytes(codec, codec.block) +
         (rest ? BlockBytes(codec, rest) : 0);
}

void Encode(const Codec& codec, const EncodeArgs& args) {
  const FloatMode mode;
  Chosen().encode(codec, args);
}

void Decode(const Codec& codec, const DecodeArgs& args) {
  const FloatMode mode;
  Chosen().decode(codec, args);
}

}  // namespace tfdist
