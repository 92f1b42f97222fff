// Runs a GPU's kernels on the processor: each thread of a block is a thread of the system.
#pragma once

#define TFDIST_SIMULATED_GPU

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "device/kernels/tiles.h"

namespace tfdist::device {

class SimulatedHalfWarp {
 public:
  SimulatedHalfWarp() { pthread_barrier_init(&barrier_, nullptr, kHalfWarp); }
  ~SimulatedHalfWarp() { pthread_barrier_destroy(&barrier_); }
  SimulatedHalfWarp(const SimulatedHalfWarp&) = delete;
  SimulatedHalfWarp& operator=(const SimulatedHalfWarp&) = delete;

  void Wait() { pthread_barrier_wait(&barrier_); }
  template <typename T>
  void Gather(uint32_t member, T own, T* all) {
    static_assert(sizeof(T) == sizeof(values_[0]));
    std::memcpy(&values_[member], &own, sizeof(own));
    Wait();
    std::memcpy(all, values_, sizeof(values_));
    Wait();
  }

 private:
  pthread_barrier_t barrier_;
  uint32_t values_[kHalfWarp];
};

class SimulatedBlock {
 public:
  explicit SimulatedBlock(uint32_t threads)
      : half_warps_(new SimulatedHalfWarp[threads / kHalfWarp]) {
    pthread_barrier_init(&barrier_, nullptr, threads);
  }
  ~SimulatedBlock() { pthread_barrier_destroy(&barrier_); }
  SimulatedBlock(const SimulatedBlock&) = delete;
  SimulatedBlock& operator=(const SimulatedBlock&) = delete;

  bool All(bool condition) {
    if (!condition) any_fails_ = true;
    pthread_barrier_wait(&barrier_);
    const bool all = !any_fails_;
    if (pthread_barrier_wait(&barrier_) == PTHREAD_BARRIER_SERIAL_THREAD) any_fails_ = false;
    pthread_barrier_wait(&barrier_);
    return all;
  }
  uint32_t* words() { return words_; }
  SimulatedHalfWarp& HalfWarpOf(uint32_t thread) { return half_warps_[thread / kHalfWarp]; }

 private:
  const std::unique_ptr<SimulatedHalfWarp[]> half_warps_;
  pthread_barrier_t barrier_;
  std::atomic<bool> any_fails_{false};
  uint32_t words_[kBlockWords];
};

struct SimulatedThread {
  uint32_t thread = 0, threads = 1, index = 0, blocks = 1;
  SimulatedBlock* block = nullptr;
};
inline thread_local SimulatedThread here;

inline uint64_t LoadWord(const uint64_t* word) {
  std::this_thread::yield();  // the awaited threads may need this core
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void StoreWord(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

inline uint64_t Nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline uint32_t Thread() { return here.thread; }
inline uint32_t ThreadsOfBlock() { return here.threads; }
inline uint32_t BlockIndex() { return here.index; }
inline uint32_t Blocks() { return here.blocks; }
inline uint32_t AddTo(uint32_t* sum, uint32_t more) {
  return __atomic_fetch_add(sum, more, __ATOMIC_RELAXED);
}
inline uint32_t CountBits(uint32_t bits) { return static_cast<uint32_t>(__builtin_popcount(bits)); }
template <typename T>
T* OfMemory(T* data) {
  return data;
}
inline uint32_t* BlockWords() { return here.block->words(); }
inline bool AllOfBlock(bool condition) { return here.block->All(condition); }

inline SimulatedHalfWarp& ThisHalfWarp() { return here.block->HalfWarpOf(here.thread); }
inline void SyncHalfWarp() { ThisHalfWarp().Wait(); }
template <typename T>
inline void GatherInHalfWarp(T own, T (&all)[kHalfWarp]) {
  ThisHalfWarp().Gather(here.thread % kHalfWarp, own, all);
}
inline uint32_t MaxOfHalfWarp(uint32_t own) {
  uint32_t all[kHalfWarp];
  ThisHalfWarp().Gather(here.thread % kHalfWarp, own, all);
  return *std::max_element(all, all + kHalfWarp);
}

// Runs a kernel to its end, one block after the other, like a GPU with a single multiprocessor.
template <typename... Parameters, typename... Arguments>
void Launch(void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads,
            const Arguments&... arguments) {
  for (uint32_t index = 0; index < blocks; ++index) {
    SimulatedBlock block(threads);
    std::vector<std::thread> running;
    for (uint32_t thread = 0; thread < threads; ++thread) {
      running.emplace_back([&, thread] {
        here = {thread, threads, index, blocks, &block};
        kernel(arguments...);
      });
    }
    for (std::thread& each : running) each.join();
  }
}

}  // namespace tfdist::device

#define TFDIST_UNROLL
#define TFDIST_UNROLL_BY(times) static_cast<void>(times);
#define TFDIST_KERNEL extern "C" void
#define TFDIST_WIDE_KERNEL extern "C" void
