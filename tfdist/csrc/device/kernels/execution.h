// The machine as kernels use it: threads, shared words, time.
#pragma once

#include <cstdint>

#include "device/kernels/tiles.h"

#ifdef __CUDACC__

namespace tfdist::device {

// Words that other GPUs or the host read and write while kernels run. What was written before a
// store, by this thread or by those it has met at a barrier, is seen by whoever loads the value.
inline uint64_t LoadWord(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
inline void StoreWord(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

inline uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

inline uint32_t Thread() { return threadIdx.x; }
inline uint32_t ThreadsOfBlock() { return blockDim.x; }
inline uint32_t BlockIndex() { return blockIdx.x; }
inline uint32_t Blocks() { return gridDim.x; }
// A sum in memory that threads of all blocks add to; what it was before.
inline uint32_t AddTo(uint32_t* sum, uint32_t more) { return atomicAdd(sum, more); }
inline uint32_t CountBits(uint32_t bits) { return static_cast<uint32_t>(__popc(bits)); }

// Tells the compiler that an address is in global memory. Where it is also used as a number, as to
// see whether it is aligned, the compiler would not know, and would take the slower generic
// accesses.
template <typename T>
T* OfMemory(T* data) {
  __builtin_assume(__isGlobal(data));
  return data;
}

// Uninitialized memory of a running block.
inline uint32_t* BlockWords() {
  __shared__ uint32_t words[kBlockWords];
  return words;
}
// Waits for all threads of the block, and returns whether the condition holds for all of them.
inline bool AllOfBlock(bool condition) { return __syncthreads_and(condition); }

inline uint32_t TeamMask() { return 0xffffu << (threadIdx.x & kTeam); }
// Waits for the team; all of it then sees each thread's earlier writes.
inline void MeetTeam() { __syncwarp(TeamMask()); }
// The values of the team's threads, in order.
template <typename T>
inline void TellTeam(T own, T (&all)[kTeam]) {
#pragma unroll
  for (uint32_t k = 0; k < kTeam; ++k) all[k] = __shfl_sync(TeamMask(), own, k, kTeam);
}
inline uint32_t LargestOfTeam(uint32_t own) {
#pragma unroll
  for (uint32_t away = kTeam / 2; away > 0; away /= 2) {
    const uint32_t other = __shfl_xor_sync(TeamMask(), own, away, kTeam);
    own = other > own ? other : own;
  }
  return own;
}

}  // namespace tfdist::device

#define TFDIST_UNROLL _Pragma("unroll")
#define TFDIST_PRAGMA(text) _Pragma(#text)
#define TFDIST_UNROLL_BY(times) TFDIST_PRAGMA(unroll(times))
#define TFDIST_KERNEL extern "C" __global__ void __launch_bounds__(512)
// With up to 64 registers a thread, where the compiler would rather have more threads and too few.
#define TFDIST_WIDE_KERNEL extern "C" __global__ void __launch_bounds__(512, 2)

#elif !defined(TFDIST_SIMULATED_GPU)
#error "Only NVIDIA's compilers know this machine; a test includes a simulated one first."
#endif

namespace tfdist::device {

// Waits for all threads of the block; all of them then see each thread's earlier writes.
inline void MeetBlock() { AllOfBlock(true); }

// This thread's index in the grid, and the number of threads.
inline uint64_t ThreadOfGrid() { return uint64_t{BlockIndex()} * ThreadsOfBlock() + Thread(); }
inline uint64_t ThreadsOfGrid() { return uint64_t{Blocks()} * ThreadsOfBlock(); }

// This thread's place in its team, its team's among all of the grid's, and how many there are.
inline uint32_t Lane() { return Thread() % kTeam; }
inline uint64_t TeamOfGrid() { return ThreadOfGrid() / kTeam; }
inline uint64_t TeamsOfGrid() { return ThreadsOfGrid() / kTeam; }

}  // namespace tfdist::device
