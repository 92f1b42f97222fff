// The staging buffers of an all-reduce, and the arguments of kernels that wait for other GPUs.
#pragma once

#include <cstdint>

// The arguments of kernels that wait for the kernels of other ranks. Each rank has words in its
// memory to which the other ranks write, and its kernels wait until these words change. Every wait
// ends eventually, because it has a timeout, and because the host can abort it.

namespace tfdist::device {

constexpr uint32_t kMaxRanks = 16;
// The maximum number of blocks of a kernel in which each block waits for blocks of other ranks.
constexpr uint32_t kMaxBlocks = 32;
constexpr uint32_t kBarrierWords = kMaxBlocks * kMaxRanks;

// Why the kernels of a rank have stopped waiting for other ranks. A kernel writes this value to
// host memory. kRunning means that they have not stopped.
enum class Outcome : uint64_t { kRunning, kAborted, kLate };

struct Waiting {
  const uint64_t* abort;  // in host memory; not 0 if the kernels must give up
  uint64_t* outcome;      // in host memory; an `Outcome`
  uint64_t* ended;  // in device memory; not 0 if the later kernels must return without any effect
  uint64_t nanoseconds;  // the timeout of each wait
};

// A barrier between the ranks of a host. Each rank has words in its memory: one word for each pair
// of a block and another rank. The other rank writes the number of the barrier to this word when
// its block has arrived.
struct KernelBarrier {
  uint32_t rank;
  uint32_t ranks;
  // The number of this barrier. Each barrier has a number that is larger by 1 than the number of
  // the previous barrier.
  uint64_t number;
  // The address of each rank's words. The words of a block are contiguous.
  uint64_t* words[kMaxRanks];
};

}  // namespace tfdist::device

// The staging buffers. The ranks of a host write their values to these buffers, so that the other
// ranks can read them.
//
// Each rank has two buffers and alternates between them from one reduction to the next. A rank may
// overwrite a buffer without asking whether the other ranks have finished reading it. The reason is
// that in the previous reduction, which used the other buffer, all ranks have arrived at a barrier.
// A rank arrives there only after it has finished all earlier reductions.

namespace tfdist::device {

struct Staging {
  char* of[kMaxRanks];  // the buffer of each rank, with its address for this rank
  uint32_t rank;
  uint32_t ranks;
  // In two shots: the number of vectors that each rank reduces. The last ranks may have fewer
  // vectors.
  uint64_t part;
};

}  // namespace tfdist::device
