// The kernels that encode, sum and decode the values of a compressed all-reduce. Each block of
// values is handled by a half-warp, so a thread waits for at most 15 other threads. No kernel waits
// for another GPU or for the host.
#include "device/kernels/blocks.h"
#include "device/kernels/coding.h"
#include "device/kernels/encodings.h"
#include "device/kernels/execution.h"
#include "device/kernels/names.h"
#include "device/kernels/windows.h"

namespace tfdist::device {

template <typename F>
void EncodeAll(const Batch& batch, const Place& in, const Place& error, const Room& room,
               uint8_t* to) {
  ForBlocks(batch.count, batch.codec.block, [&](uint64_t begin, uint32_t count) {
    const Window given(in, begin, count, room.At(0)), left(error, begin, count, room.At(1));
    given.Fetch();
    left.Fetch();
    EncodeBlock<F>(batch.codec, Block(given.values(), left.values(), count), SeedAt(batch, begin),
                   to + BytesBefore<F>(batch.codec, begin), nullptr);
    left.Return();
  });
}

template <typename F>
void DecodeAll(const Codec& codec, uint64_t count, const uint8_t* from, const Place& out,
               const Room& room) {
  ForBlocks(count, codec.block, [&](uint64_t begin, uint32_t values) {
    const Window decoded(out, begin, values, room.At(0));
    DecodeBlock<F>(from + BytesBefore<F>(codec, begin), values, decoded.values());
    decoded.Return();
  });
}

// The default way to sum: `Own` returns this rank's own value without encoding it, and `Of` returns
// the sum without changing it.
template <typename F>
struct Exact {
  Exact(const Codec&, const float* values, uint32_t) : own(values) {}
  float Own(uint32_t i) const { return own[i]; }
  static float Of(float sum) { return sum; }

  const float* const own;
};

// The way to sum votes: `Own` returns this rank's vote, which is encoded and decoded like the votes
// of the other ranks. `Of` returns the sign of a sum, so that the majority decides. The result of a
// tie is 0.
template <typename F>
struct Vote {
  Vote(const Codec& codec, const float* values, uint32_t count) : own(values) {
    const Block block(values, nullptr, count);
    finite = block.largest < kInfinity;
    header = finite ? F(codec, block).header() : F::NotFinite();
  }
  float Own(uint32_t i) const { return F::Value(finite ? SignsValues::Code(own[i]) : 0, header); }
  // NaN stays NaN.
  static float Of(float sum) { return sum > 0 ? 1.0f : sum < 0 ? -1.0f : sum; }

  const float* const own;
  bool finite;
  typename F::Header header;
};

// Sums the values of this rank's part over all members, in the order of the members, and encodes
// the sums. `F` is the encoding of the received values, `S` is the encoding of the sums, and `How`
// is `Exact` or `Vote`.
template <typename F, typename S, template <typename> class How>
void SumAll(const Batch& batch, const Arrived& arrived, const Place& in, const Place& error,
            const Place& out, const Room& room, uint8_t* to) {
  ForBlocks(batch.count, batch.codec.block, [&](uint64_t begin, uint32_t count) {
    const Window given(in, begin, count, room.At(0)), left(error, begin, count, room.At(1)),
        result(out, begin, count, room.At(2));
    given.Fetch();
    left.Fetch();
    float* const sums = room.At(3) + begin;
    const How<F> how(arrived.codec, given.values(), count);
    const uint8_t* const first = arrived.encoded + BytesBefore<F>(arrived.codec, begin);
    ForCodes<F>(count, [&](uint32_t i, uint32_t place, uint32_t shift) {
      float sum = 0;
      for (uint32_t member = 0; member < arrived.members; ++member) {
        const uint8_t* const from = first + member * arrived.stride;
        sum += member == arrived.me ? how.Own(i)
                                    : F::Value(CodeAt<F>(from, place, shift), LoadHeader<F>(from));
      }
      sums[i] = How<F>::Of(sum);
    });
    SyncHalfWarp();
    EncodeBlock<S>(batch.codec, Block(sums, left.values(), count), SeedAt(batch, begin),
                   to + BytesBefore<S>(batch.codec, begin), result.values());
    left.Return();
    result.Return();
  });
}

#define TFDIST_CODE(name, F)                                                                \
  TFDIST_WIDE_KERNEL tfdist_encode_##name(Batch batch, Place in, Place error, Room room,    \
                                          uint8_t* to) {                                    \
    EncodeAll<F>(batch, in, error, room, to);                                               \
  }                                                                                         \
  TFDIST_WIDE_KERNEL tfdist_decode_##name(Codec codec, uint64_t count, const uint8_t* from, \
                                          Place out, Room room) {                           \
    DecodeAll<F>(codec, count, from, out, room);                                            \
  }                                                                                         \
  TFDIST_WIDE_KERNEL tfdist_sum_##name(Batch batch, Arrived arrived, Place in, Place error, \
                                       Place out, Room room, uint8_t* to) {                 \
    SumAll<F, F, Exact>(batch, arrived, in, error, out, room, to);                          \
  }
TFDIST_FOR_ALL_ENCODINGS(TFDIST_CODE)

TFDIST_WIDE_KERNEL tfdist_sum_votes(Batch batch, Arrived arrived, Place in, Place error, Place out,
                                    Room room, uint8_t* to) {
  SumAll<SignsEncoding, LevelsEncoding<2>, Vote>(batch, arrived, in, error, out, room, to);
}

}  // namespace tfdist::device
