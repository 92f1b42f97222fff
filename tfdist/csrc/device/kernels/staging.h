// Staging buffers, and the arguments of kernels that wait for other GPUs.
#pragma once

#include <cstdint>

// The arguments of kernels that wait for kernels of other ranks. The ranks write to words in each
// other's memory, and the kernels wait for these words. Every wait ends, either because the host
// aborts it or because of a timeout.

namespace tfdist::device {

constexpr uint32_t kMaxRanks = 16;
// The maximum number of blocks if blocks synchronize with blocks of other ranks.
constexpr uint32_t kMaxBlocks = 32;
constexpr uint32_t kBarrierWords = kMaxBlocks * kMaxRanks;

// Why a rank has stopped waiting. The kernel writes it to host memory.
enum class Outcome : uint64_t { kRunning, kAborted, kLate };

struct Waiting {
  const uint64_t* abort;  // in host memory; if it is nonzero, the kernels give up
  uint64_t* outcome;      // in host memory
  uint64_t* ended;        // in GPU memory, for later kernels; nonzero if there is an outcome
  uint64_t nanoseconds;   // the timeout
};

// A barrier of the ranks of a host. In the memory of each rank, each block has one word for each
// other rank.
struct KernelBarrier {
  uint32_t rank;
  uint32_t ranks;
  uint64_t number;             // number of this barrier; it increases by 1 from barrier to barrier
  uint64_t* words[kMaxRanks];  // for each rank; the words of a block are contiguous
};

}  // namespace tfdist::device

// The staging buffers, into which the ranks of a host write their values so that other ranks can
// read them.
//
// Each rank alternates between two buffers, so it uses a buffer again in the collective after the
// next. This is safe: in the collective in between, all ranks have arrived at a barrier. They have
// therefore finished reading the buffer.

namespace tfdist::device {

struct Staging {
  char* of[kMaxRanks];  // for each rank, its buffer as seen by this rank
  uint32_t rank;
  uint32_t ranks;
  // The number of vectors that each rank reduces in two shots. The last ranks may have fewer.
  uint64_t part;
};

}  // namespace tfdist::device
