// Encodes and decodes blocks of values. A half-warp handles a block. The results are bitwise
// identical to the results on the CPU, because both add the values of a block in the same order:
// the CPU adds them in 16 lanes, and each thread of the half-warp adds the values of one lane.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/kernels/coding.h"
#include "device/kernels/encodings.h"
#include "device/kernels/execution.h"

namespace tfdist::device {
namespace {

// Contiguous values that a thread loads or stores together.
template <uint32_t kCount>
struct alignas(kCount * sizeof(float)) Pack {
  float values[kCount];
};

template <uint32_t kCount>
void PutPack(const Pack<kCount>& pack, float* to) {
  *reinterpret_cast<Pack<kCount>*>(to) = pack;
}

inline bool IsAligned(const void* data, uint32_t bytes) {
  return reinterpret_cast<uint64_t>(data) % bytes == 0;
}

// The values of a block. With error feedback, each value is the sum of the input and the residual.
struct Block {
  Block(const float* given, float* left, uint32_t values)
      : in(OfMemory(given)), error(left), count(values) {
    uint32_t bits = 0;
    ForLane([&](float value) {
      const uint32_t magnitude = FloatToBits(value) & kMagnitude;
      bits = magnitude > bits ? magnitude : bits;
    });
    largest = MaxOfHalfWarp(bits);
  }
  // The index has 64 bits. An index of 32 bits may wrap around, so the compiler could not compute
  // the addresses of later values by adding constants to the address of the first value.
  float operator[](uint64_t i) const { return error ? in[i] + OfMemory(error)[i] : in[i]; }

  // Returns the kCount values that begin at index `i`. The addresses of these values in `in` and
  // `error` must be aligned to the size of the pack.
  template <uint32_t kCount>
  Pack<kCount> At(uint32_t i) const {
    Pack<kCount> pack = *reinterpret_cast<const Pack<kCount>*>(in + i);
    if (error) {
      const Pack<kCount> left = *reinterpret_cast<const Pack<kCount>*>(OfMemory(error) + i);
      TFDIST_UNROLL
      for (uint32_t k = 0; k < kCount; ++k) pack.values[k] += left.values[k];
    }
    return pack;
  }

  // Calls `use(value)` for each value of this thread's lane, in order. The lane of thread t
  // consists of the values t, t + 16, t + 32, and so on. The function loads several values before
  // it uses them, because memory is slow.
  template <typename Use>
  void ForLane(Use use) const {
    constexpr uint32_t kAtOnce = 16;
    uint32_t i = Lane();
    for (; i + (kAtOnce - 1) * kHalfWarp < count; i += kAtOnce * kHalfWarp) {
      const uint64_t first = i;
      float values[kAtOnce];
      TFDIST_UNROLL
      for (uint32_t k = 0; k < kAtOnce; ++k) values[k] = (*this)[first + k * kHalfWarp];
      TFDIST_UNROLL
      for (uint32_t k = 0; k < kAtOnce; ++k) use(values[k]);
    }
    for (; i < count; i += kHalfWarp) use((*this)[i]);
  }

  template <typename Term>
  float Sum(Term term) const {
    float own = 0, lanes[kHalfWarp], sum = 0;
    ForLane([&](float value) { own += term(value); });
    GatherInHalfWarp(own, lanes);
    TFDIST_UNROLL
    for (uint32_t k = 0; k < kHalfWarp; ++k) sum += lanes[k];
    return Finite(sum);
  }

  const float* const in;
  float* const error;  // the residual; null without error feedback
  const uint32_t count;
  uint32_t largest;  // the largest magnitude, as the bits of a float
};

// The layout of the codes in a block (see `codec/layout.h`). A place is the smallest unit of memory
// that contains whole codes: it has kPlaceBits bits, which are a byte, or 16 bits for codes of 16
// bits. Place k contains the codes of the values k, k + places, k + 2 * places, and so on: one code
// from each of the kCount planes.
template <typename F>
struct Planes {
  static constexpr uint32_t kBits = BitsOf(F::kCodec), kPlaceBits = kBits > 8 ? kBits : 8;
  static constexpr uint32_t kCount = kPlaceBits / kBits;

  explicit Planes(uint32_t count) : places((count + kCount - 1) / kCount) {}

  const uint32_t places;
};

// Calls `use(i, place, shift)` for each value i of a block that this thread handles, in the order
// of the places. The code of value i is in place `place`, where it begins at bit `shift`.
template <typename F, typename Use>
void ForCodes(uint32_t count, Use use) {
  const uint32_t places = Planes<F>(count).places;
  // The number of places that a thread handles together. A larger number would need too many
  // registers.
  constexpr uint32_t kPlacesAtOnce = Planes<F>::kBits == 8 ? 4 : 1;
  TFDIST_UNROLL_BY(kPlacesAtOnce)
  for (uint32_t k = Lane(); k < places; k += kHalfWarp) {
    TFDIST_UNROLL
    for (uint32_t p = 0; p < Planes<F>::kCount; ++p) {
      const uint32_t i = k + p * places;
      if (i < count) use(i, k, p * Planes<F>::kBits);
    }
  }
}

template <typename F>
uint32_t CodeAt(const uint8_t* block, uint32_t place, uint32_t shift) {
  constexpr uint32_t kBits = BitsOf(F::kCodec);
  const uint8_t* const payload = block + HeaderBytes(F::kCodec);
  if constexpr (kBits > 8) return reinterpret_cast<const uint16_t*>(payload)[place];
  return payload[place] >> shift & ((1u << kBits) - 1);
}

template <typename F>
typename F::Header LoadHeader(const uint8_t* block) {
  typename F::Header header{};
  std::memcpy(&header, block, HeaderBytes(F::kCodec));
  return header;
}

template <typename F>
void PutHeader(const typename F::Header& header, uint8_t* block) {
  if (Lane() == 0) std::memcpy(block, &header, HeaderBytes(F::kCodec));
}

// Returns the number of encoded bytes that precede the block that begins at value `before`.
template <typename F>
uint64_t BytesBefore(const Codec& codec, uint64_t before) {
  return before / codec.block * BlockBytes(F::kCodec, codec.block);
}

// The unsigned integer type with kBits bits.
template <uint32_t kBits>
using CodesOf =
    std::conditional_t<kBits == 32, uint32_t, std::conditional_t<kBits == 16, uint16_t, uint8_t>>;

// Encodes the values of a block. A thread handles kPlaces contiguous places together. It can
// therefore load and store kPlaces contiguous values of each plane together.
template <typename F, uint32_t kPlaces>
void EncodeValues(const F& encoding, const Block& block, uint32_t seed, uint8_t* payload,
                  float* out) {
  using P = Planes<F>;
  constexpr uint32_t kAtOnce = P::kCount < 4 / kPlaces ? P::kCount : 4 / kPlaces;
  const uint32_t places = P(block.count).places;
  const auto is_in = [&](uint32_t i) { return kPlaces > 1 || i < block.count; };
  for (uint32_t k = Lane() * kPlaces; k < places; k += kHalfWarp * kPlaces) {
    uint32_t codes = 0;
    TFDIST_UNROLL
    for (uint32_t first = 0; first < P::kCount; first += kAtOnce) {
      // All of these values are loaded before any result is stored, because loads that are in
      // flight at the same time take less time.
      Pack<kPlaces> values[kAtOnce];
      TFDIST_UNROLL
      for (uint32_t p = 0; p < kAtOnce; ++p) {
        const uint32_t i = k + (first + p) * places;
        if (is_in(i)) values[p] = block.At<kPlaces>(i);
      }
      TFDIST_UNROLL
      for (uint32_t p = 0; p < kAtOnce; ++p) {
        const uint32_t i = k + (first + p) * places;
        if (!is_in(i)) continue;
        Pack<kPlaces> decoded, left;
        TFDIST_UNROLL
        for (uint32_t v = 0; v < kPlaces; ++v) {
          const float value = values[p].values[v];
          const uint32_t code = encoding.Code(value, seed + i + v);
          codes |= code << (v * P::kPlaceBits + (first + p) * P::kBits);
          decoded.values[v] = F::Value(code, encoding.header());
          left.values[v] = value - decoded.values[v];
        }
        if (block.error) PutPack(left, OfMemory(block.error) + i);
        if (out) PutPack(decoded, OfMemory(out) + i);
      }
    }
    using Codes = CodesOf<kPlaces * P::kPlaceBits>;
    reinterpret_cast<Codes*>(payload)[k / kPlaces] = static_cast<Codes>(codes);
  }
}

// Encodes a block, and writes the encoded block to `to`.
// Args: out: receives the decoded values, unless it is null.
template <typename F>
void EncodeBlock(const Codec& codec, const Block& block, uint32_t seed, uint8_t* to, float* out) {
  using P = Planes<F>;
  uint8_t* const payload = to + HeaderBytes(F::kCodec);
  if (block.largest >= kInfinity) {
    PutHeader<F>(F::NotFinite(), to);
    constexpr uint32_t kCode = F::kCodec.encoding == Encoding::kBfloat16 ? kBfloat16Nan : 0;
    return ForCodes<F>(block.count, [&](uint32_t i, uint32_t place, uint32_t) {
      reinterpret_cast<CodesOf<P::kPlaceBits>*>(payload)[place] = kCode;
      if (out) out[i] = BitsToFloat(kNan);
    });
  }
  const F encoding(codec, block);
  PutHeader<F>(encoding.header(), to);
  // The number of places that a thread handles together. The codes of these places fit into one
  // word of 32 bits. For codes of a single bit, the number is smaller, because otherwise some
  // threads would have no places to handle.
  constexpr uint32_t kTogether = P::kBits == 1 ? 2 : 32 / P::kPlaceBits;
  constexpr uint32_t kBytes = kTogether * sizeof(float);
  if (block.count % (P::kCount * kTogether) == 0 && IsAligned(block.in, kBytes) &&
      IsAligned(block.error, kBytes) && IsAligned(out, kBytes) &&
      IsAligned(payload, kTogether * P::kPlaceBits / 8)) {
    EncodeValues<F, kTogether>(encoding, block, seed, payload, out);
  } else {
    EncodeValues<F, 1>(encoding, block, seed, payload, out);
  }
}

template <typename F>
void DecodeBlock(const uint8_t* from, uint32_t count, float* out) {
  const typename F::Header header = LoadHeader<F>(from);
  ForCodes<F>(count, [&](uint32_t i, uint32_t place, uint32_t shift) {
    out[i] = F::Value(CodeAt<F>(from, place, shift), header);
  });
}

// Calls `use(begin, count)` for each block that this thread's half-warp handles. A block has
// `block` values, but the last block may have fewer.
template <typename Use>
void ForBlocks(uint64_t count, uint32_t block, Use use) {
  const uint64_t step = HalfWarpsOfGrid() * block;
  for (uint64_t begin = HalfWarpOfGrid() * block; begin < count; begin += step) {
    use(begin, static_cast<uint32_t>(count - begin < block ? count - begin : block));
  }
}

// Returns the random seed of the first value of a block. The seed increases by 1 from value to
// value.
inline uint32_t SeedAt(const Batch& batch, uint64_t begin) {
  const uint64_t chunk = begin / batch.chunk;
  const uint32_t seed = batch.seed + static_cast<uint32_t>(chunk) * batch.seed_step;
  return Random(seed) + static_cast<uint32_t>(begin - chunk * batch.chunk);
}

}  // namespace
}  // namespace tfdist::device
