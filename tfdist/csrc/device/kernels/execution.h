// What kernels use of the machine that runs them: threads, words that others write, time.
#pragma once

#include <cstdint>

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
// Waits for all threads of the block; whether the condition holds for all of them.
inline bool AllOfBlock(bool condition) { return __syncthreads_and(condition); }

}  // namespace tfdist::device

#define TFDIST_UNROLL _Pragma("unroll")
#define TFDIST_KERNEL extern "C" __global__ void __launch_bounds__(512)

#else
#include "tests/simulated_gpu.h"
#endif

namespace tfdist::device {

// This thread's place among all of the grid's, and how many there are.
inline uint64_t ThreadOfGrid() { return uint64_t{BlockIndex()} * ThreadsOfBlock() + Thread(); }
inline uint64_t ThreadsOfGrid() { return uint64_t{Blocks()} * ThreadsOfBlock(); }

}  // namespace tfdist::device
