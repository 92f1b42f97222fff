// The members of a collective, the sizes of their parts, and the transfers between members.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/operation.h"
#include "memory.h"
#include "transport/fabric.h"
#include "types.h"

namespace tfdist {

// The ranks that take part in a transfer. All of them use the same order of the ranks.
struct Members {
  std::vector<int> ranks;
  int me = 0;  // the position of this rank in `ranks`
};

Members Everyone(const Topology& topology);

// Returns this rank and its counterparts: the ranks that have the same position on the other hosts.
// Every host must have a rank at this position.
Members Counterparts(const Topology& topology);

// Allocates the result of a collective that receives rows from all ranks, and returns the number of
// bytes to receive from each rank.
//
// `rows` contains the number of rows that each rank sends. If `operation.allocate` is set, this
// function calls it to allocate the result, and sets `operation.out`. Otherwise, the caller has
// already allocated the result, and `rows` must equal `operation.received_rows`.
//
// Throws Error(kMismatch) if a rank sends an unexpected number of rows, or more rows than any
// memory could hold. The message names the first such rank. Throws Error(kInternal) if there is not
// enough memory for the result.
std::vector<size_t> AllocateResult(const Topology& topology, Operation& operation,
                                   const std::vector<size_t>& rows);

// The data of a collective that reduces or gathers, independent of the transport.
//
// The data is divided into parts, and participant j owns part j. All participants know the sizes of
// all parts. When scattering, all participants send their values of a part to its owner, which
// reduces them. When gathering, each owner sends its result to all participants. An all-reduce
// first scatters and then gathers.
struct Transfer {
  bool scatter = false;
  bool gather = false;
  // The size of each participant's part in bytes. Each part consists of whole elements.
  std::vector<size_t> part_bytes;
  // The input: all parts if `scatter` is set, and otherwise only this rank's part.
  ConstBufferList in;
  // The output: all parts if `gather` is set, and otherwise only this rank's part.
  BufferList out;
  DType type = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1.0;  // the number by which the reduced values are divided
  // Whether the reduced values are stored in their partial type (`PartialType`), because they will
  // be reduced further.
  bool widens = false;

  // `InBegin` returns the offset of part j in `in`, and `OutBegin` returns its offset in `out`.
  // `Begin` returns its offset in a buffer that contains all parts. All offsets are in bytes.
  size_t InBegin(int j) const { return scatter ? Begin(j) : 0; }
  size_t OutBegin(int j) const { return gather ? Begin(j) : 0; }
  size_t Begin(int j) const;
};

// Reduces bytes [begin, begin + bytes) of participant `me`'s part, and writes the result to `out`.
// The values are reduced in the order of the participants. The values of participant `me` are read
// from `in`. The values of every other participant j are read from `others[j]`; `others[me]` is not
// used.
void ReducePart(const Transfer& transfer, int me, size_t begin, size_t bytes,
                const std::vector<const char*>& others);

// Copies bytes [begin, begin + bytes) of participant `me`'s part from `in` to `out`.
void CopyPart(const Transfer& transfer, int me, size_t begin, size_t bytes);

// Divides `bytes` bytes into parts of whole elements, and returns the size of each participant's
// part. The first `owners` participants get parts of nearly equal size; the others get empty parts.
std::vector<size_t> CutEvenly(size_t bytes, size_t element, int owners, int participants);

}  // namespace tfdist
