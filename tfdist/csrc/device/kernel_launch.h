// Launches tfdist's own kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "device/gpu.h"
#include "device/kernels/coding.h"
#include "device/kernels/lists.h"
#include "device/kernels/selecting.h"
#include "device/kernels/staging.h"
#include "device/stream_waits.h"
#include "error.h"
#include "sparse/row.h"
#include "sparse/select.h"
#include "types.h"

namespace tfdist {

// Returns the names of all kernels, for a `KernelModule`.
std::vector<const char*> KernelNames();

// Returns the names of the kernels that `KernelAllReduce` uses.
std::vector<const char*> AllReduceKernelNames();

// Runs all-reduces among the GPUs of one host with tfdist's own kernels, which read the memory of
// the other GPUs. The ranks synchronize in one of two ways: kernels wait for other ranks, or
// streams wait between two kernels.
class KernelAllReduce {
 public:
  // A tensor of a bucket, and the address of its result. Both are on the GPU.
  struct Tensor {
    cuda::Address in;
    cuda::Address out;
    size_t bytes;
  };
  // The memory of a rank that other ranks access.
  struct Shared {
    cuda::Address staging;  // `StagingBytes` bytes
    cuda::Address words;    // kWordBytes
  };
  struct Setup {
    const Gpu* gpu;
    const KernelModule* kernels;
    uint32_t rank;
    std::vector<Shared> ranks;  // addresses for this rank's GPU; at most kMaxRanks
    // The size of each of the two buffers. It is a multiple of 16, and the same on all ranks.
    size_t buffer_bytes;
    // Buckets up to this size are reduced in one shot. The default has not been tuned.
    size_t one_shot_bytes = 1 << 16;
    // The time limit of each wait of a kernel, and of `Launch`.
    double timeout_seconds = 600;
    // Null unless streams wait instead of kernels.
    StreamBarriers* stream_barriers = nullptr;
  };
  static constexpr size_t kWordBytes = device::kBarrierWords * sizeof(uint64_t);
  static constexpr size_t StagingBytes(size_t buffer_bytes) { return 2 * buffer_bytes; }

  explicit KernelAllReduce(Setup setup);

  // Queues a reduction of tensors, which must have the same sizes on all ranks. If kernels wait,
  // returns immediately. If streams wait, first waits until only a few launches are pending, or
  // until the guard ends this wait.
  void Launch(const std::vector<Tensor>& tensors, DType type, ReduceOp op, cuda::Stream* stream,
              Guard& guard);

  // Ends all waits, and disables work that has not begun. May be called from any thread.
  void Abort() noexcept;
  // Returns the outcome of the waits. If a wait has failed, later launches have had no effect. The
  // outcome is final when the stream has finished its work.
  device::Outcome outcome() const;

 private:
  void LaunchList(const device::List& list, DType type, ReduceOp op, cuda::Stream* stream);
  void SyncRanks(cuda::Stream* stream);
  void AwaitRoom(cuda::Stream* stream, Guard& guard);

  const Setup setup_;
  MappedMemory host_;   // two words: whether to give up, and the outcome
  DeviceMemory ended_;  // one word: whether there is an outcome
  DeviceStream aside_;  // writes to `ended_` while kernels wait
  device::Waiting waiting_{};
  device::Staging staging_{};
  device::KernelBarrier barrier_{};
  size_t turn_ = 0;
  DeviceEvent room_;  // if streams wait: recorded some launches ago
  size_t launches_ = 0;
};

// Returns the names of the kernels that `KernelCodec` uses.
std::vector<const char*> CodecKernelNames();

// Encodes, sums and decodes values with kernels. All memory is on the GPU.
class KernelCodec {
 public:
  KernelCodec(const KernelModule& kernels, cuda::Stream* stream)
      : kernels_(kernels), stream_(stream) {}
  static constexpr size_t RoomBytes(size_t values) {
    return device::kRooms * values * sizeof(float);
  }

  // Each function queues its work in the stream and returns immediately.
  // Args: error: the residual, or an empty place if there is no error feedback; room: `RoomBytes`
  // bytes for the number of values.
  void Encode(const device::Batch& batch, const device::Place& in, const device::Place& error,
              cuda::Address room, cuda::Address to) const;
  void Decode(const Codec& codec, size_t count, cuda::Address from, const device::Place& out,
              cuda::Address room) const;
  // Sums the values of all ranks. The values of this rank are in `in`, and are not encoded. Encodes
  // the sums with the codec of the batch, and decodes them into `out`.
  // Args: votes: whether a sum is replaced with the sign of the majority.
  void Sum(const device::Batch& batch, const device::Arrived& arrived, bool votes,
           const device::Place& in, const device::Place& error, const device::Place& out,
           cuda::Address room, cuda::Address to) const;

 private:
  template <typename... Arguments>
  void Launch(const std::string& name, size_t count, uint32_t block, Arguments... arguments) const;

  const KernelModule& kernels_;
  cuda::Stream* const stream_;
};

// Returns the names of the kernels that `KernelScatter` uses.
std::vector<const char*> ScatterKernelNames();

// Sums the rows of all ranks into tensors with kernels. The results have the same bits as on the
// CPU. All memory is on the GPU.
class KernelScatter {
 public:
  // Args: ranks: the number of ranks. The rows of each rank are consecutive.
  KernelScatter(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream, size_t ranks)
      : gpu_(gpu), kernels_(kernels), stream_(stream), ranks_(ranks) {}

  // Returns the size of the memory that is needed until the stream has finished its work.
  size_t ScratchBytes() const;
  // Queues the same work that `SumRows` does on the CPU, and returns immediately. If rows are
  // invalid, for example because an index is out of range, all sums become NaN.
  void Sum(const Row* rows, size_t count, const std::vector<RowSums>& tensors,
           cuda::Address scratch) const;

 private:
  const Gpu& gpu_;
  const KernelModule& kernels_;
  cuda::Stream* const stream_;
  const size_t ranks_;
};

// Returns the names of the kernels that `KernelSelect` uses.
std::vector<const char*> SelectKernelNames();

// Selects the values of a sparse gradient with kernels. The results have the same bits as on the
// CPU. All memory is on the GPU.
class KernelSelect {
 public:
  // Args: all: the candidates of each tensor. In total, there are fewer than `kMaxCandidates` of
  // them.
  KernelSelect(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream,
               const std::vector<Candidates>& all);

  // Returns the size of the memory that is needed from the first call until the stream has finished
  // the work of the last call.
  size_t ScratchBytes() const;

  // These functions queue the update of the residuals and the selection, as in `SelectLargest` and
  // `SelectAbove`, and return immediately.
  // Args: selected: the number of values to select from each tensor.
  void FindLargest(const std::vector<size_t>& selected, cuda::Address scratch);
  void FindAbove(float threshold, cuda::Address scratch);
  // Returns the address of the number of selected rows, a uint32.
  cuda::Address rows() const { return cuda::AddressOf(cuts_.all_rows); }
  // Queues the same work that `TakeRows` does on the CPU.
  void Take(Row* rows);

 private:
  void Begin(uint32_t magnitude, cuda::Address scratch);
  void Fill(const void* from, uint32_t value, size_t words) const;
  void Count(bool accumulates);
  template <typename... Arguments>
  void Launch(const char* name, uint64_t half_warps, Arguments... arguments) const;

  const Gpu& gpu_;
  const KernelModule& kernels_;
  cuda::Stream* const stream_;
  std::vector<device::Sources> lists_;
  uint32_t tensors_ = 0;
  size_t tiles_ = 0;
  bool keeps_ = false;  // whether values that are not selected are kept
  device::Cuts cuts_{};
};

}  // namespace tfdist
