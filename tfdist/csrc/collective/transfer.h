// The members of a collective, the sizes of their parts, and transfers between them.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/operation.h"
#include "memory.h"
#include "transport/fabric.h"
#include "types.h"

namespace tfdist {

// The ranks that take part in a transfer, in an order that all of them know.
struct Members {
  std::vector<int> ranks;
  int me = 0;  // this rank's position among them
};

Members Everyone(const Topology& topology);

// The ranks at this one's place on every host; each host has that place.
Members Counterparts(const Topology& topology);

// The rows that the ranks have told each other, and room for what comes.
//
// Sets `operation.out` to room for the rows that come from each rank, which are believed only as
// far as there is room for them. Where the caller has made the room already, they must be what it
// expects. Returns the bytes that come from each rank. Throws Error(kMismatch) that names the first
// rank whose rows cannot be, or Error(kInternal) where there is no memory.
std::vector<size_t> MakeRoom(const Topology& topology, Operation& operation,
                             const std::vector<size_t>& rows);

// What moves in a reducing or gathering collective, whatever it moves through.
//
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
