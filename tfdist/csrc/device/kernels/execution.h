// The environment of a kernel: its threads, the time, and words in memory that it shares with other
// GPUs and with the host.
#pragma once

#include <cstdint>

#include "device/kernels/tiles.h"

#ifdef __CUDACC__

namespace tfdist::device {

// `LoadWord` and `StoreWord` access words that other GPUs or the host read and write while a kernel
// runs. If a load returns a value that another thread has stored, the loading thread also sees all
// writes that happened before this store. These include the writes of other threads with which the
// storing thread has synchronized.
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
// Atomically adds to a sum that several threads share, and returns the previous sum.
inline uint32_t AddTo(uint32_t* sum, uint32_t more) { return atomicAdd(sum, more); }
inline uint32_t CountBits(uint32_t bits) { return static_cast<uint32_t>(__popc(bits)); }

// Tells the compiler that an address is in global memory. Without this hint, the compiler uses
// generic accesses, which are slower, if the address is also used as a number, for example to check
// its alignment.
template <typename T>
T* OfMemory(T* data) {
  __builtin_assume(__isGlobal(data));
  return data;
}

// Returns the shared memory of the running block. It is uninitialized.
inline uint32_t* BlockWords() {
  __shared__ uint32_t words[kBlockWords];
  return words;
}
// Waits for all threads of the block. Returns whether `condition` is true in all threads.
inline bool AllOfBlock(bool condition) { return __syncthreads_and(condition); }

inline uint32_t HalfWarpMask() { return 0xffffu << (threadIdx.x & kHalfWarp); }
// Waits for all threads of the half-warp. Afterwards, they see each other's earlier writes.
inline void SyncHalfWarp() { __syncwarp(HalfWarpMask()); }
// Collects one value from each thread of the half-warp, in the order of the threads. Each thread
// receives all these values.
template <typename T>
inline void GatherInHalfWarp(T own, T (&all)[kHalfWarp]) {
#pragma unroll
  for (uint32_t k = 0; k < kHalfWarp; ++k) all[k] = __shfl_sync(HalfWarpMask(), own, k, kHalfWarp);
}
inline uint32_t MaxOfHalfWarp(uint32_t own) {
#pragma unroll
  for (uint32_t away = kHalfWarp / 2; away > 0; away /= 2) {
    const uint32_t other = __shfl_xor_sync(HalfWarpMask(), own, away, kHalfWarp);
    own = other > own ? other : own;
  }
  return own;
}

}  // namespace tfdist::device

#define TFDIST_UNROLL _Pragma("unroll")
#define TFDIST_PRAGMA(text) _Pragma(#text)
#define TFDIST_UNROLL_BY(times) TFDIST_PRAGMA(unroll(times))
#define TFDIST_KERNEL extern "C" __global__ void __launch_bounds__(512)
// Lets the compiler use up to 64 registers per thread. Otherwise, the compiler would use too few
// registers, because more threads could then run at the same time.
#define TFDIST_WIDE_KERNEL extern "C" __global__ void __launch_bounds__(512, 2)

#elif !defined(TFDIST_SIMULATED_GPU)
#error "Only NVIDIA's compilers know this machine; a test includes a simulated one first."
#endif

namespace tfdist::device {

// Waits for all threads of the block. Afterwards, they see each other's earlier writes.
inline void SyncBlock() { AllOfBlock(true); }

// `ThreadOfGrid` returns the index of this thread in the grid. `ThreadsOfGrid` returns the number
// of threads in the grid.
inline uint64_t ThreadOfGrid() { return uint64_t{BlockIndex()} * ThreadsOfBlock() + Thread(); }
inline uint64_t ThreadsOfGrid() { return uint64_t{Blocks()} * ThreadsOfBlock(); }

// `Lane` returns the index of this thread in its half-warp. `HalfWarpOfGrid` returns the index of
// this half-warp in the grid. `HalfWarpsOfGrid` returns the number of half-warps in the grid.
inline uint32_t Lane() { return Thread() % kHalfWarp; }
inline uint64_t HalfWarpOfGrid() { return ThreadOfGrid() / kHalfWarp; }
inline uint64_t HalfWarpsOfGrid() { return ThreadsOfGrid() / kHalfWarp; }

}  // namespace tfdist::device
