// Ranks of one host with GPUs: simulated by threads of a fake driver, or sharing one real GPU.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "device/stream_waits.h"
#include "error.h"
#include "types.h"

namespace tfdist::testing {

constexpr size_t kGpuBuffer = 4096;
constexpr size_t kGpuOneShot = 1024;

// The path of the fake CUDA driver, FAKE_CUDA in the environment; "" for the real one.
std::string FakeDriver();

// Makes a function of the fake driver fail from now on, with a status; 0 to succeed again.
void FailDriver(const char* function, int status);

// The resources that the fake driver has handed out in this process and not got back.
std::string HeldByDriver();

// The compiled kernels: for a real GPU, in the file GPU_KERNELS.
std::string KernelBinary();

// Never ends a wait.
struct NoGuard : Guard {
  void Check() override {}
};

// The words with which the streams of ranks wait for each other, also in forked processes.
class StreamWords {
 public:
  StreamWords();
  ~StreamWords();
  StreamWords(const StreamWords&) = delete;
  StreamWords& operator=(const StreamWords&) = delete;

  void* get() const { return words_; }
  // The word in which a rank signals another one at a barrier.
  uint64_t* At(uint32_t owner, uint64_t barrier, uint32_t writer) const;

 private:
  void* const words_;
};

// One rank, and the memory that other ranks access. All memory is allocated at the start: freeing
// some would wait for waiting kernels.
class GpuRank {
 public:
  GpuRank();
  KernelAllReduce::Shared own() const { return {staging.address(), words.address()}; }

  // Creates `all_reduce`, once all ranks are known; also after a failed round. Args: stream_words:
  // set if streams wait instead of kernels.
  void Join(uint32_t rank, std::vector<KernelAllReduce::Shared> ranks, double seconds = 600,
            const StreamWords* stream_words = nullptr);

  void Upload(const std::vector<char>& values, cuda::Address to);
  std::vector<char> Download(cuda::Address from, size_t bytes);

  // Reduces tensors in place, every second of them unaligned. Returns the results, or nothing if a
  // wait was aborted.
  std::vector<std::vector<char>> Reduce(DType type, ReduceOp op,
                                        const std::vector<std::vector<char>>& tensors);

  // The same with tensors of the given numbers of values, from `Fill`; returns whether all results
  // are right.
  bool Reduces(DType type, ReduceOp op, const std::vector<size_t>& counts, int rank, int ranks);

  Gpu gpu;
  KernelModule kernels;
  DeviceMemory staging, words, data;
  DeviceStream stream;
  std::unique_ptr<StreamBarriers> stream_barriers;
  std::unique_ptr<KernelAllReduce> all_reduce;
};

using GpuRanks = std::vector<std::unique_ptr<GpuRank>>;

// Ranks of this process, which have joined.
GpuRanks MakeGpuRanks(uint32_t ranks, double seconds = 600, const StreamWords* words = nullptr);

// Calls `body` for each rank in its own thread.
void OnEachGpu(GpuRanks& group, const std::function<void(GpuRank&, int rank)>& body);

}  // namespace tfdist::testing
