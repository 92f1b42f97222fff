// What moves in a reducing or gathering collective, whatever it moves through.
#pragma once

#include <cstddef>
#include <vector>

#include "pieces.h"
#include "types.h"

namespace tfdist {

// One transfer. Participant j owns a part of the data; all know the parts' sizes. Scattering brings
// everyone's values of a part to its owner, which reduces them; gathering brings the owner's result
// to everyone; together they are an all-reduce.
struct Transfer {
  bool scatter = false;
  bool gather = false;
  std::vector<size_t> part_bytes;  // for each participant; whole elements
  ConstPieces in;                  // all parts when scattering, else the own part
  Pieces out;                      // all parts when gathering, else the own part
  DType type = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1.0;  // of the reduced values
  // Whether scattered values become results of their partial type, to be reduced further.
  bool widens = false;

  // Where a part begins in `in`, and in `out`.
  size_t InBegin(int j) const { return scatter ? Begin(j) : 0; }
  size_t OutBegin(int j) const { return gather ? Begin(j) : 0; }
  size_t Begin(int j) const;
};

// Reduces bytes [begin, begin + bytes) of participant me's part into `out`: its own values and
// those of the others, which begin at `others[j]` (others[me] is not read), in the participants'
// order.
void ReducePart(const Transfer& transfer, int me, size_t begin, size_t bytes,
                const std::vector<const char*>& others);

// Copies bytes [begin, begin + bytes) of participant me's part from `in` to `out`.
void CopyPart(const Transfer& transfer, int me, size_t begin, size_t bytes);

// Cuts `bytes` into parts of whole elements for the first `owners` of `participants`, as even as
// possible.
std::vector<size_t> CutEvenly(size_t bytes, size_t element, int owners, int participants);

}  // namespace tfdist
