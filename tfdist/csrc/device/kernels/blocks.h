// How a team encodes a block, and decodes one: as the processor does, to the same bits. Its threads are
// the lanes of a sum.
#pragma once

#include <cstdint>
#include <cstring>

#include "device/kernels/coding.h"
#include "device/kernels/execution.h"
#include "device/kernels/forms.h"

namespace tfdist::device {
namespace {

// One block of values, with what was not sent so far.
struct Block {
  Block(const float* given, float* left, uint32_t values)
      : in(given), error(left), count(values) {
    uint32_t bits = 0;
    ForLane([&](float value) {
      const uint32_t magnitude = FloatToBits(value) & kMagnitude;
      bits = magnitude > bits ? magnitude : bits;
    });
    largest = LargestOfTeam(bits);
  }
  // By 64 bits: the address of a later one is that of the first plus a constant.
  float operator[](uint64_t i) const { return error ? in[i] + error[i] : in[i]; }

  // Calls `use(value)` for each value of this thread's lane, in their order; several are loaded at once.
  template <typename Use>
  void ForLane(Use use) const {
    constexpr uint32_t kAtOnce = 8;
    uint32_t i = Lane();
    for (; i + (kAtOnce - 1) * kTeam < count; i += kAtOnce * kTeam) {
      const uint64_t first = i;
      float values[kAtOnce];
TFDIST_UNROLL
      for (uint32_t k = 0; k < kAtOnce; ++k) values[k] = (*this)[first + k * kTeam];
TFDIST_UNROLL
      for (uint32_t k = 0; k < kAtOnce; ++k) use(values[k]);
    }
    for (; i < count; i += kTeam) use((*this)[i]);
  }

  template <typename Term>
  float Sum(Term term) const {
    float own = 0, lanes[kTeam], sum = 0;
    ForLane([&](float value) { own += term(value); });
    TellTeam(own, lanes);
TFDIST_UNROLL
    for (uint32_t k = 0; k < kTeam; ++k) sum += lanes[k];
    return Finite(sum);
  }

  const float* const in;
  float* const error;  // null for none
  const uint32_t count;
  uint32_t largest;  // bits of a magnitude
};

// Calls `use(i, where)` for each value of a block, where it lies: the byte and the bit of its code, of
// those that this thread sees to, byte by byte; `end(byte)` after each.
template <typename F, typename Use, typename End>
void ForCodes(uint32_t count, Use use, End end) {
  constexpr uint32_t kBits = BitsOf(F::kCodec);
  if constexpr (kBits > 8) {
    for (uint32_t i = Lane(); i < count; i += kTeam) {
      use(i, i, 0);
      end(i);
    }
  } else {
    const uint32_t plane = static_cast<uint32_t>(PayloadBytes(kBits, count));
    constexpr uint32_t kBytesAtOnce = kBits == 8 ? 4 : 1;  // or there are not enough registers
TFDIST_UNROLL_BY(kBytesAtOnce)
    for (uint32_t k = Lane(); k < plane; k += kTeam) {
TFDIST_UNROLL
      for (uint32_t p = 0; p < 8 / kBits; ++p) {
        const uint32_t i = k + p * plane;
        if (i < count) use(i, k, p * kBits);
      }
      end(k);
    }
  }
}

// The same without `end`.
template <typename F, typename Use>
void ForCodes(uint32_t count, Use use) {
  ForCodes<F>(count, use, [](uint32_t) {});
}

template <typename F>
uint32_t CodeAt(const uint8_t* block, uint32_t place, uint32_t shift) {
  constexpr uint32_t kBits = BitsOf(F::kCodec);
  const uint8_t* const payload = block + HeaderBytes(F::kCodec);
  if constexpr (kBits > 8) return reinterpret_cast<const uint16_t*>(payload)[place];
  return payload[place] >> shift & ((1u << kBits) - 1);
}

template <typename F>
void PutCodes(uint8_t* block, uint32_t place, uint32_t codes) {
  uint8_t* const payload = block + HeaderBytes(F::kCodec);
  if constexpr (BitsOf(F::kCodec) > 8) {
    reinterpret_cast<uint16_t*>(payload)[place] = static_cast<uint16_t>(codes);
  } else {
    payload[place] = static_cast<uint8_t>(codes);
  }
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

// Where a block begins that `before` values come before.
template <typename F>
uint64_t BytesBefore(const Codec& codec, uint64_t before) {
  return before / codec.block * BlockBytes(F::kCodec, codec.block);
}

// Args: out: where the decoded values go, too; null for nowhere.
template <typename F>
void EncodeBlock(const Codec& codec, const Block& block, uint32_t seed, uint8_t* to,
                 float* out) {
  uint32_t codes = 0;
  const auto put = [&](uint32_t place) {
    PutCodes<F>(to, place, codes);
    codes = 0;
  };
  if (block.largest >= kInfinity) {
    PutHeader<F>(F::NotFinite(), to);
    constexpr uint32_t kCode = F::kCodec.form == Form::kBfloat16 ? kBfloat16Nan : 0;
    const auto lose = [&](uint32_t i, uint32_t, uint32_t) {
      codes = kCode;
      if (out) out[i] = BitsToFloat(kNan);
    };
    return ForCodes<F>(block.count, lose, put);
  }
  const F form(codec, block);
  PutHeader<F>(form.header(), to);
  const auto encode = [&](uint32_t i, uint32_t, uint32_t shift) {
    const float value = block[i];
    const uint32_t code = form.Code(value, seed + i);
    codes |= code << shift;
    const float decoded = F::Value(code, form.header());
    if (block.error) block.error[i] = value - decoded;
    if (out) out[i] = decoded;
  };
  ForCodes<F>(block.count, encode, put);
}

template <typename F>
void DecodeBlock(const uint8_t* from, uint32_t count, float* out) {
  const typename F::Header header = LoadHeader<F>(from);
  ForCodes<F>(count, [&](uint32_t i, uint32_t place, uint32_t shift) {
    out[i] = F::Value(CodeAt<F>(from, place, shift), header);
  });
}

// Calls `use(begin, count)` for each block of so many values that this thread's team sees to.
template <typename Use>
void ForBlocks(uint64_t count, uint32_t block, Use use) {
  const uint64_t step = TeamsOfGrid() * block;
  for (uint64_t begin = TeamOfGrid() * block; begin < count; begin += step) {
    use(begin, static_cast<uint32_t>(count - begin < block ? count - begin : block));
  }
}

// Of a block's first value.
inline uint32_t SeedAt(const Batch& batch, uint64_t begin) {
  const uint64_t chunk = begin / batch.chunk;
  const uint32_t seed = batch.seed + static_cast<uint32_t>(chunk) * batch.seed_step;
  return Random(seed) + static_cast<uint32_t>(begin - chunk * batch.chunk);
}

}  // namespace
}  // namespace tfdist::device
