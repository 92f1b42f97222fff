// Staging buffers, and waits for other GPUs.
#pragma once

#include <cstdint>

// Arguments of kernels that wait for kernels of other ranks: words in each rank's memory that the
// other ranks write. Every wait ends: when the host aborts it, or by its timeout.

namespace tfdist::device {

constexpr uint32_t kMaxRanks = 16;
constexpr uint32_t kMaxBlocks = 32;  // if they synchronize with the other ranks' blocks
constexpr uint32_t kBarrierWords = kMaxBlocks * kMaxRanks;

// Why a rank stopped waiting; written to host memory.
enum class Outcome : uint64_t { kRunning, kAborted, kLate };

struct Waiting {
  const uint64_t* abort;  // in host memory: nonzero to abort
  uint64_t* outcome;      // in host memory
  uint64_t* ended;        // in GPU memory, for later kernels: nonzero once there is an outcome
  uint64_t nanoseconds;   // the timeout
};

// A barrier of a host's ranks. Each rank has in its memory, for each block, a word for each other
// rank.
struct KernelBarrier {
  uint32_t rank;
  uint32_t ranks;
  uint64_t number;             // of this barrier; increases by 1 each time
  uint64_t* words[kMaxRanks];  // per rank; the words for a block are contiguous
};

}  // namespace tfdist::device

// The staging buffers, into which the ranks of a host write their values for the others to read.
//
// Each rank alternates between two buffers. A buffer is free again at the beginning of its rank's
// next collective but one: all ranks have then arrived at a barrier of the collective in between,
// and so have finished reading the buffer.

namespace tfdist::device {

struct Staging {
  char* of[kMaxRanks];  // per rank, as seen by this rank
  uint32_t rank;
  uint32_t ranks;
  uint64_t part;  // vectors that each rank reduces in two shots; the last ranks may have fewer
};

}  // namespace tfdist::device
