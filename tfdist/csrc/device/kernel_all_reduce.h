// An all-reduce among the GPUs of one host by our own kernels, which read each other's memory. The ranks
// meet in kernels that wait, or between kernels, while their streams wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/gpu.h"
#include "device/kernels/lists.h"
#include "device/kernels/staging.h"
#include "device/kernels/waiting.h"
#include "device/stream_meetings.h"
#include "guard.h"
#include "types.h"

namespace tfdist {

// The names of its kernels.
std::vector<const char*> AllReduceKernelNames();

class KernelAllReduce {
 public:
  // One tensor of a bucket, and where its result goes; on the GPU.
  struct Tensor {
    cuda::Address in;
    cuda::Address out;
    size_t bytes;
  };
  // What the ranks reach of each other's memory.
  struct Shared {
    cuda::Address staging;  // `StagingBytes` of them
    cuda::Address words;    // kWordBytes
  };
  struct Setup {
    const Gpu* gpu;
    const KernelModule* kernels;
    uint32_t rank;
    std::vector<Shared> ranks;      // as this rank sees them; at most kMostRanks
    size_t buffer_bytes;            // of each of two buffers: a multiple of 16, the same on all ranks
    size_t one_shot_bytes = 1 << 16;  // up to so many are reduced in one shot; not measured yet
    double timeout_seconds = 600;   // of each wait of a kernel, and of `Launch`
    StreamMeetings* meetings = nullptr;  // where streams wait, not kernels
  };
  static constexpr size_t kWordBytes = device::kMeetingWords * sizeof(uint64_t);
  static constexpr size_t StagingBytes(size_t buffer_bytes) { return 2 * buffer_bytes; }

  explicit KernelAllReduce(Setup setup);

  // Has a stream reduce tensors, of the same sizes on all ranks; returns at once. Where streams wait,
  // until they are told not to, it first waits until few launches are left, or the guard ends that.
  void Launch(const std::vector<Tensor>& tensors, DType type, ReduceOp op, cuda::Stream* stream,
              Guard& guard);

  // Ends all waits, and has what has not begun do nothing; from any thread.
  void Abort() noexcept;
  // Whether a wait has ended in vain, and so what was launched since has not been done. Final once
  // the stream has passed.
  device::Outcome outcome() const;

 private:
  void LaunchList(const device::List& list, DType type, ReduceOp op, cuda::Stream* stream);
  void Meet(cuda::Stream* stream);
  void AwaitRoom(cuda::Stream* stream, Guard& guard);

  const Setup setup_;
  MappedMemory host_;   // two words: whether to give up, and the outcome
  DeviceMemory ended_;  // a word: whether there is an outcome
  DeviceStream aside_;  // to write that word while kernels wait
  device::Waiting waiting_{};
  device::Staging staging_{};
  device::Meeting meeting_{};
  size_t turn_ = 0;
  DeviceEvent room_;  // some launches back, where streams wait
  size_t launches_ = 0;
};

}  // namespace tfdist
