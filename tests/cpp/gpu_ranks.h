// Ranks of one host with GPUs: those of a driver made of threads, or one real GPU for all of them.
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

// The driver that stands for CUDA's, FAKE_CUDA in the environment; "" for the real one.
std::string FakeDriver();

// Has a function of that driver fail from now on, with a status; 0 to succeed again.
void FailDriver(const char* function, int status);

// What that driver has handed out in this process, and has not got back.
std::string HeldByDriver();

// The compiled kernels, which are in the file GPU_KERNELS for a real GPU.
std::string KernelBinary();

// Ends no wait.
struct NoGuard : Guard {
  void Check() override {}
};

// By which the streams of ranks wait for each other, also those of forked processes.
class StreamWords {
 public:
  StreamWords();
  ~StreamWords();
  StreamWords(const StreamWords&) = delete;
  StreamWords& operator=(const StreamWords&) = delete;

  void* get() const { return words_; }
  // What a rank has told another one of a meeting.
  uint64_t* At(uint32_t owner, uint64_t meeting, uint32_t writer) const;

 private:
  void* const words_;
};

// One rank, and what the others reach of its memory. All memory is there from the start: to free
// some would wait for kernels that wait.
class GpuRank {
 public:
  GpuRank();
  KernelAllReduce::Shared own() const { return {staging.address(), words.address()}; }

  // Makes `all_reduce`, once all ranks are known. After a round that failed, too.
  // Args: where streams wait, not kernels.
  void Join(uint32_t rank, std::vector<KernelAllReduce::Shared> ranks, double seconds = 600,
            const StreamWords* stream_words = nullptr);

  void Upload(const std::vector<char>& values, cuda::Address to);
  std::vector<char> Download(cuda::Address from, size_t bytes);

  // Reduces tensors in place, every second of which lies at no multiple of anything; returns what
  // has become of them, nothing if a wait has ended.
  std::vector<std::vector<char>> Reduce(DType type, ReduceOp op,
                                        const std::vector<std::vector<char>>& tensors);

  // The same with tensors of so many values of `Fill`; returns whether all is right.
  bool Reduces(DType type, ReduceOp op, const std::vector<size_t>& counts, int rank, int ranks);

  Gpu gpu;
  KernelModule kernels;
  DeviceMemory staging, words, data;
  DeviceStream stream;
  std::unique_ptr<StreamMeetings> meetings;
  std::unique_ptr<KernelAllReduce> all_reduce;
};

using GpuTeam = std::vector<std::unique_ptr<GpuRank>>;

// Ranks of this process, which have joined.
GpuTeam MakeGpuTeam(uint32_t ranks, double seconds = 600, const StreamWords* words = nullptr);

// Calls `body` with each rank in a thread of its own.
void OnEachGpu(GpuTeam& team, const std::function<void(GpuRank&, int rank)>& body);

}  // namespace tfdist::testing
