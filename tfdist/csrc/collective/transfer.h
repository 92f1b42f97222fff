// The members of a collective, the sizes of their parts, and the transfers between members.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/operation.h"
#include "memory.h"
#include "transport/fabric.h"
#include "types.h"

namespace tfdist {

// The ranks that take part in a transfer, in an order that is the same on all of them.
struct Members {
  std::vector<int> ranks;
  int me = 0;  // this rank's position in `ranks`
};

Members Everyone(const Topology& topology);

// Returns the ranks that have the same position on their host as this rank has. Each host must have
// a rank at this position.
Members Counterparts(const Topology& topology);

// Allocates the result of a collective that receives rows from all ranks, and returns the number of
// bytes from each rank.
//
// `rows` contains the number of rows from each rank. The function sets `operation.out` to memory
// for all these rows. If the caller has already allocated this memory, the numbers must equal
// `operation.received_rows`. A number is invalid if it differs from the expected number, or if no
// memory could hold the rows. Throws Error(kMismatch) that names the first rank with an invalid
// number, or Error(kInternal) if there is not enough memory.
std::vector<size_t> AllocateResult(const Topology& topology, Operation& operation,
                                   const std::vector<size_t>& rows);

// The data of a collective that reduces or gathers, independent of the transport.
//
// The data are divided into parts, and participant j owns part j. All participants know the sizes
// of all parts. Scattering sends all values of a part to its owner, which reduces them. Gathering
// sends the owner's result to all participants. An all-reduce is a scattering that is followed by a
// gathering.
struct Transfer {
  bool scatter = false;
  bool gather = false;
  std::vector<size_t> part_bytes;  // size of each participant's part; whole elements
  ConstBufferList in;              // all parts when scattering, otherwise this rank's part
  BufferList out;                  // all parts when gathering, otherwise this rank's part
  DType type = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1.0;  // divides the reduced values
  // Whether the reduced values are stored in their partial type, because they will be reduced
  // further.
  bool widens = false;

  // The offset of part j in `in` and in `out`, in bytes.
  size_t InBegin(int j) const { return scatter ? Begin(j) : 0; }
  size_t OutBegin(int j) const { return gather ? Begin(j) : 0; }
  size_t Begin(int j) const;
};

// Reduces bytes [begin, begin + bytes) of participant `me`'s part in the order of the participants,
// and writes the result to `out`. The values of participant `me` are read from `in`. The values of
// every other participant j begin at `others[j]`; `others[me]` is not read.
void ReducePart(const Transfer& transfer, int me, size_t begin, size_t bytes,
                const std::vector<const char*>& others);

// Copies bytes [begin, begin + bytes) of participant `me`'s part from `in` to `out`.
void CopyPart(const Transfer& transfer, int me, size_t begin, size_t bytes);

// Divides `bytes` bytes into parts of whole elements, and returns the size of each participant's
// part. The first `owners` participants get parts of nearly equal size; the others get empty parts.
std::vector<size_t> CutEvenly(size_t bytes, size_t element, int owners, int participants);

}  // namespace tfdist
