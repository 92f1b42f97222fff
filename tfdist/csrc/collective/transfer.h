// The members of a collective, the sizes of their parts, and transfers between them.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/operation.h"
#include "memory.h"
#include "transport/fabric.h"
#include "types.h"

namespace tfdist {

// The ranks of a transfer, in an order known to all of them.
struct Members {
  std::vector<int> ranks;
  int me = 0;  // this rank's position in `ranks`
};

Members Everyone(const Topology& topology);

// The ranks at this rank's position on every host; each host must have a rank at that position.
Members Counterparts(const Topology& topology);

// Allocates the result for the row counts of all ranks.
//
// Sets `operation.out` to room for the rows from each rank. Counts that exceed the available memory
// are rejected. If the caller has already allocated the room, the counts must match it. Returns the
// bytes from each rank. Throws Error(kMismatch) naming the first rank with an invalid count, or
// Error(kInternal) if out of memory.
std::vector<size_t> AllocateResult(const Topology& topology, Operation& operation,
                                   const std::vector<size_t>& rows);

// The data of a reducing or gathering collective, regardless of the transport.
//
// Participant j owns a part of the data; all know the parts' sizes. Scattering sends all values of
// a part to its owner, which reduces them. Gathering sends the owner's result to all participants.
// Scattering and then gathering is an all-reduce.
struct Transfer {
  bool scatter = false;
  bool gather = false;
  std::vector<size_t> part_bytes;  // per participant; whole elements
  ConstBufferList in;              // all parts when scattering, otherwise the own part
  BufferList out;                  // all parts when gathering, otherwise the own part
  DType type = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1.0;  // of the reduced values
  // Whether scattered values yield results of their partial type, which are reduced further.
  bool widens = false;

  // The offset of a part in `in` and in `out`.
  size_t InBegin(int j) const { return scatter ? Begin(j) : 0; }
  size_t OutBegin(int j) const { return gather ? Begin(j) : 0; }
  size_t Begin(int j) const;
};

// Reduces bytes [begin, begin + bytes) of participant me's part into `out`: its own values and the
// others' values, which begin at `others[j]` (others[me] is not read), in the participants' order.
void ReducePart(const Transfer& transfer, int me, size_t begin, size_t bytes,
                const std::vector<const char*>& others);

// Copies bytes [begin, begin + bytes) of participant me's part from `in` to `out`.
void CopyPart(const Transfer& transfer, int me, size_t begin, size_t bytes);

// Cuts `bytes` into parts of whole elements for the first `owners` of `participants`, as evenly as
// possible.
std::vector<size_t> CutEvenly(size_t bytes, size_t element, int owners, int participants);

}  // namespace tfdist
