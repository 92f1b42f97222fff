// Selects values of a sparse gradient. The results are bitwise identical to the results on the CPU.
//
// First, the kernels find the cut of each tensor, which is the smallest magnitude of a selected
// value. They find the cut digit by digit, beginning with the highest digit: they count how many
// magnitudes have each possible value of the digit. Then they count the selected values of each
// tile. From these counts, they compute the position of each tile's first row.
#include <cstdint>

#include "device/kernels/execution.h"
#include "device/kernels/selecting.h"
#include "device/kernels/tile_loops.h"
#include "reduce/half.h"
#include "sparse/row.h"

namespace tfdist::device {
namespace {

#include "sparse/arithmetic.inc"

constexpr uint32_t kSign = 0x80000000, kInfinite = 0x7f800000;

float CandidateAt(const Source& s, uint32_t i) { return s.error ? s.error[i] : s.scale * s.in[i]; }

uint32_t MagnitudeAt(const Source& s, uint32_t i) {
  return FloatToBits(CandidateAt(s, i)) & ~kSign;
}

bool IsNotFinite(float value) { return (FloatToBits(value) & ~kSign) >= kInfinite; }

// Adds the input to the residual of a value, and updates the value's momentum if there is one.
void Accumulate(const Source& s, uint32_t i) {
  if (!s.error) return;
  float added = s.scale * s.in[i];
  if (s.momentum) s.momentum[i] = added = NextMomentum(s.momentum[i], s.factor, added);
  s.error[i] += added;
}

uint32_t DigitOf(uint32_t magnitude, const Digit& digit) {
  return magnitude >> digit.shift & ((1u << digit.bits) - 1);
}

// Returns how many marked values of the tile precede a certain value of this thread: the value of
// bit `bit`. A thread has one bit for each of its values, and sets the bits of the values that it
// marks. `marked` contains the bits of all threads of the half-warp.
uint32_t Before(const uint32_t (&marked)[kHalfWarp], uint32_t bit) {
  uint32_t before = 0;
  TFDIST_UNROLL
  for (uint32_t lane = 0; lane < kHalfWarp; ++lane) {
    before += CountBits(marked[lane] & (((lane < Lane() ? 2u : 1u) << bit) - 1));
  }
  return before;
}

template <typename Use>
void ForBits(uint32_t word, Use use) {
  for (; word != 0; word &= word - 1) use(CountBits((word & (0 - word)) - 1));
}

uint32_t Smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

}  // namespace

// Counts, for each value that a digit can have, how many magnitudes have this digit. Only
// magnitudes with the same higher digits as the cut are counted. A block handles one tensor after
// another. It counts in its shared memory before it adds the counts to `cuts.digits`, because
// atomic additions to global memory are slow.
TFDIST_WIDE_KERNEL tfdist_select_digits(Sources list, Digit digit, bool accumulates, Cuts cuts) {
  const uint32_t each = (list.tiles + Blocks() - 1) / Blocks(), begin = BlockIndex() * each;
  const uint32_t end = Smaller(begin + each, list.tiles), values = 1u << digit.bits;
  const uint32_t above = digit.shift + digit.bits;
  uint32_t* const counts = BlockWords();
  for (uint32_t next = begin; next < end;) {
    const uint32_t k = FindTensor(list, list.first_tile + next);
    const Source& s = list.tensors[k];
    const uint32_t first = s.first_tile - list.first_tile;
    const uint32_t behind = Smaller(end, first + TilesOf(s.count));
    const uint32_t stop = Smaller(s.count, (behind - first) * kTile);
    const uint32_t cut = cuts.magnitudes[list.number + k] >> above;
    for (uint32_t i = Thread(); i < values; i += ThreadsOfBlock()) counts[i] = 0;
    SyncBlock();
    for (uint32_t i = (next - first) * kTile + Thread(); i < stop; i += ThreadsOfBlock()) {
      if (accumulates) Accumulate(s, i);
      const uint32_t magnitude = MagnitudeAt(s, i);
      if (magnitude >> above == cut) AddTo(counts + DigitOf(magnitude, digit), 1);
    }
    SyncBlock();
    for (uint32_t i = Thread(); i < values; i += ThreadsOfBlock()) {
      if (counts[i] > 0) AddTo(cuts.digits + k * kDigitValues + i, counts[i]);
    }
    SyncBlock();
    next = behind;
  }
}

// Determines one digit of the cut of each tensor, from the counts of `tfdist_select_digits`. A
// half-warp handles a tensor, and each of its threads handles some of the values that the digit can
// have.
TFDIST_WIDE_KERNEL tfdist_select_narrow(Sources list, Digit digit, Cuts cuts) {
  const bool is_first = digit.shift == kDigits[0].shift;
  for (uint64_t k = HalfWarpOfGrid(); k < list.count; k += HalfWarpsOfGrid()) {
    const Source& s = list.tensors[k];
    uint32_t* const magnitude = cuts.magnitudes + list.number + k;
    uint32_t* const equal = cuts.equals + list.number + k;
    uint32_t* const counts = cuts.digits + k * kDigitValues;
    // The number of values that must be selected among the magnitudes that have been counted. The
    // largest are selected first.
    const uint32_t wanted = is_first ? Smaller(s.selected, s.count) : *equal;
    const uint32_t each = (1u << digit.bits) / kHalfWarp, begin = Lane() * each;
    uint32_t own = 0, all[kHalfWarp], above = 0;
    for (uint32_t i = 0; i < each; ++i) own += counts[begin + i];
    GatherInHalfWarp(own, all);
    TFDIST_UNROLL
    for (uint32_t lane = 0; lane < kHalfWarp; ++lane) above += lane > Lane() ? all[lane] : 0;
    if (above < wanted && wanted <= above + own) {
      uint32_t value = begin + each - 1;
      for (; above + counts[value] < wanted; --value) above += counts[value];
      *magnitude |= value << digit.shift;
      *equal = wanted - above;
    }
    // No value is selected, because ~0u is larger than all magnitudes.
    if (wanted == 0 && Lane() == 0) *magnitude = ~0u;
    for (uint32_t i = 0; i < each; ++i) counts[begin + i] = 0;
  }
}

TFDIST_WIDE_KERNEL tfdist_select_count(Sources list, bool accumulates, Cuts cuts) {
  ForTiles(list,
           [&](const Source& s, uint32_t number, uint32_t tile, uint32_t begin, uint32_t count) {
             const uint32_t cut = cuts.magnitudes[number];
             uint32_t above = 0, equal = 0, all[kHalfWarp];
             for (uint32_t i = Lane(); i < count; i += kHalfWarp) {
               if (accumulates) Accumulate(s, begin + i);
               const uint32_t magnitude = MagnitudeAt(s, begin + i);
               above += magnitude > cut;
               equal += magnitude == cut;
             }
             // Both counts fit into 16 bits, because a tile has fewer than 2^16 values.
             GatherInHalfWarp(above << 16 | equal, all);
             Tally tally{};
             TFDIST_UNROLL
             for (uint32_t lane = 0; lane < kHalfWarp; ++lane) {
               tally.above += all[lane] >> 16;
               tally.equal += all[lane] & 0xffff;
             }
             if (Lane() == 0) cuts.tallies[tile] = tally;
           });
}

// Replaces the counts of each tile with the sums of the counts of all earlier tiles of the same
// tensor. Also computes the number of selected values of each tensor. A block handles a tensor, and
// each thread handles some of the tensor's tiles.
TFDIST_WIDE_KERNEL tfdist_select_place(Sources list, Cuts cuts) {
  uint32_t *const aboves = BlockWords(), *const equals = aboves + ThreadsOfBlock();
  for (uint32_t k = BlockIndex(); k < list.count; k += Blocks()) {
    const Source& s = list.tensors[k];
    const uint32_t tiles = TilesOf(s.count), threads = ThreadsOfBlock();
    const uint32_t each = (tiles + threads - 1) / threads;
    const uint32_t begin = Smaller(Thread() * each, tiles), end = Smaller(begin + each, tiles);
    Tally* const tallies = cuts.tallies + s.first_tile;
    Tally own{}, before{};
    for (uint32_t tile = begin; tile < end; ++tile) {
      own.above += tallies[tile].above;
      own.equal += tallies[tile].equal;
    }
    aboves[Thread()] = own.above;
    equals[Thread()] = own.equal;
    SyncBlock();
    for (uint32_t other = 0; other < Thread(); ++other) {
      before.above += aboves[other];
      before.equal += equals[other];
    }
    for (uint32_t tile = begin; tile < end; ++tile) {
      const Tally counted = tallies[tile];
      tallies[tile] = before;
      before.above += counted.above;
      before.equal += counted.equal;
    }
    if (Thread() == threads - 1) {
      const uint32_t number = list.number + k;
      cuts.rows[number] = before.above + Smaller(before.equal, cuts.equals[number]);
    }
    SyncBlock();
  }
}

// Replaces the number of rows of each tensor with the number of rows of all earlier tensors, which
// is the position of the tensor's first row. A single thread does this.
TFDIST_WIDE_KERNEL tfdist_select_sum(uint32_t tensors, Cuts cuts) {
  if (ThreadOfGrid() > 0) return;
  uint32_t before = 0;
  for (uint32_t number = 0; number < tensors; ++number) {
    const uint32_t own = cuts.rows[number];
    cuts.rows[number] = before;
    before += own;
  }
  *cuts.all_rows = before;
}

// Writes the selected values to rows, and sets them to zero in the residual and in the momentum.
TFDIST_WIDE_KERNEL tfdist_select_take(Sources list, Cuts cuts, Row* rows) {
  ForTiles(
      list, [&](const Source& s, uint32_t number, uint32_t tile, uint32_t begin, uint32_t count) {
        const uint32_t cut = cuts.magnitudes[number], most = cuts.equals[number];
        const Tally earlier = cuts.tallies[tile];
        uint32_t taken = 0, equal = 0, all[kHalfWarp];
        for (uint32_t i = Lane(), bit = 1; i < count; i += kHalfWarp, bit <<= 1) {
          const uint32_t magnitude = MagnitudeAt(s, begin + i);
          if (magnitude > cut) taken |= bit;
          if (magnitude == cut) equal |= bit;
        }
        GatherInHalfWarp(equal, all);
        ForBits(equal, [&](uint32_t bit) {
          if (earlier.equal + Before(all, bit) < most) taken |= 1u << bit;
        });
        GatherInHalfWarp(taken, all);
        Row* const to = rows + cuts.rows[number] + earlier.above + Smaller(earlier.equal, most);
        ForBits(taken, [&](uint32_t bit) {
          const uint32_t i = begin + bit * kHalfWarp + Lane();
          const float value = CandidateAt(s, i);
          to[Before(all, bit)] = {static_cast<int32_t>(s.first + i), value};
          if (IsNotFinite(value)) AddTo(cuts.not_finite + number, 1);
          if (s.error) s.error[i] = 0;
          if (s.momentum) s.momentum[i] = 0;
        });
      });
}

// If a selected value of a tensor is not finite, sets all values of the residual and of the
// momentum that are not finite to zero. Infinities and NaNs are selected before other values, so
// the sum of this step is already infinite or NaN. If any of them remained in the residual, they
// would spoil the sums of later steps as well.
TFDIST_WIDE_KERNEL tfdist_select_forget(Sources list, Cuts cuts) {
  ForTiles(list, [&](const Source& s, uint32_t number, uint32_t, uint32_t begin, uint32_t count) {
    if (cuts.not_finite[number] == 0) return;
    for (uint32_t i = begin + Lane(); i < begin + count; i += kHalfWarp) {
      if (IsNotFinite(s.error[i])) s.error[i] = 0;
      if (s.momentum && IsNotFinite(s.momentum[i])) s.momentum[i] = 0;
    }
  });
}

}  // namespace tfdist::device
