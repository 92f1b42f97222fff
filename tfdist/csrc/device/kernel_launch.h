// Launches of the kernels.
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

// The names of all kernels, for a `KernelModule`.
std::vector<const char*> KernelNames();

// The names of the kernels of `KernelAllReduce`.
std::vector<const char*> AllReduceKernelNames();

// An all-reduce among the GPUs of one host with tfdist's own kernels, which read each other's
// memory. The ranks synchronize either in kernels that wait, or between kernels by streams that
// wait.
class KernelAllReduce {
 public:
  // One tensor of a bucket and the address of its result; on the GPU.
  struct Tensor {
    cuda::Address in;
    cuda::Address out;
    size_t bytes;
  };
  // The memory of a rank that the other ranks access.
  struct Shared {
    cuda::Address staging;  // `StagingBytes` bytes
    cuda::Address words;    // kWordBytes
  };
  struct Setup {
    const Gpu* gpu;
    const KernelModule* kernels;
    uint32_t rank;
    std::vector<Shared> ranks;  // as this rank sees them; at most kMaxRanks
    size_t buffer_bytes;        // of each of two buffers: a multiple of 16, the same on all ranks
    size_t one_shot_bytes = 1 << 16;  // buckets up to this size are reduced in one shot; untuned
    double timeout_seconds = 600;     // of each wait of a kernel, and of `Launch`
    StreamBarriers* stream_barriers = nullptr;  // set if streams wait instead of kernels
  };
  static constexpr size_t kWordBytes = device::kBarrierWords * sizeof(uint64_t);
  static constexpr size_t StagingBytes(size_t buffer_bytes) { return 2 * buffer_bytes; }

  explicit KernelAllReduce(Setup setup);

  // Queues a reduction of tensors, which must have the same sizes on all ranks. Returns at once,
  // except if streams wait: then this call first waits until few launches are pending, or until the
  // guard ends the wait.
  void Launch(const std::vector<Tensor>& tensors, DType type, ReduceOp op, cuda::Stream* stream,
              Guard& guard);

  // Ends all waits and disables work that has not begun; may be called from any thread.
  void Abort() noexcept;
  // The outcome of the waits: if a wait has failed, later launches had no effect. Final once the
  // stream has finished its work.
  device::Outcome outcome() const;

 private:
  void LaunchList(const device::List& list, DType type, ReduceOp op, cuda::Stream* stream);
  void SyncRanks(cuda::Stream* stream);
  void AwaitRoom(cuda::Stream* stream, Guard& guard);

  const Setup setup_;
  MappedMemory host_;   // two words: whether to give up, and the outcome
  DeviceMemory ended_;  // a word: whether there is an outcome
  DeviceStream aside_;  // to write that word while kernels wait
  device::Waiting waiting_{};
  device::Staging staging_{};
  device::KernelBarrier barrier_{};
  size_t turn_ = 0;
  DeviceEvent room_;  // recorded some launches ago, if streams wait
  size_t launches_ = 0;
};

// The names of the kernels of `KernelCodec`.
std::vector<const char*> CodecKernelNames();

// Encodes, sums and decodes with kernels. All memory is on the GPU.
class KernelCodec {
 public:
  KernelCodec(const KernelModule& kernels, cuda::Stream* stream)
      : kernels_(kernels), stream_(stream) {}
  static constexpr size_t RoomBytes(size_t values) {
    return device::kRooms * values * sizeof(float);
  }

  // Each call queues its work in the stream and returns at once. Args: error: empty for no error
  // feedback; room: `RoomBytes` of the number of values.
  void Encode(const device::Batch& batch, const device::Place& in, const device::Place& error,
              cuda::Address room, cuda::Address to) const;
  void Decode(const Codec& codec, size_t count, cuda::Address from, const device::Place& out,
              cuda::Address room) const;
  // Sums all ranks' values, where this rank's own values are in `in`. Encodes the sums with the
  // batch's codec, and decodes them into `out`. Args: votes: whether a sum is the sign of the
  // majority.
  void Sum(const device::Batch& batch, const device::Arrived& arrived, bool votes,
           const device::Place& in, const device::Place& error, const device::Place& out,
           cuda::Address room, cuda::Address to) const;

 private:
  template <typename... Arguments>
  void Launch(const std::string& name, size_t count, uint32_t block, Arguments... arguments) const;

  const KernelModule& kernels_;
  cuda::Stream* const stream_;
};

// The names of the kernels of `KernelScatter`.
std::vector<const char*> ScatterKernelNames();

// Sums the rows of all ranks into tensors with kernels, bit-identical to the processor. All memory
// is on the GPU.
class KernelScatter {
 public:
  // Args: ranks: the number of ranks; each rank's rows are consecutive.
  KernelScatter(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream, size_t ranks)
      : gpu_(gpu), kernels_(kernels), stream_(stream), ranks_(ranks) {}

  // Memory needed until the stream has finished its work.
  size_t ScratchBytes() const;
  // Queues the work of `SumRows` and returns at once. Invalid rows, such as an index out of range,
  // make all sums NaN.
  void Sum(const Row* rows, size_t count, const std::vector<RowSums>& tensors,
           cuda::Address scratch) const;

 private:
  const Gpu& gpu_;
  const KernelModule& kernels_;
  cuda::Stream* const stream_;
  const size_t ranks_;
};

// The names of the kernels of `KernelSelect`.
std::vector<const char*> SelectKernelNames();

// Selects the values of a sparse gradient with kernels, bit-identical to the processor. All memory
// is on the GPU.
class KernelSelect {
 public:
  // Args: all: the candidates of each tensor; fewer than `kMaxCandidates` in total.
  KernelSelect(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream,
               const std::vector<Candidates>& all);

  // Memory needed from the first call until the stream has finished the work of the last one.
  size_t ScratchBytes() const;

  // Queues the update of the residuals and the selection, as in `SelectLargest` and `SelectAbove`,
  // and returns at once. Args: selected: the number of values to select from each tensor.
  void FindLargest(const std::vector<size_t>& selected, cuda::Address scratch);
  void FindAbove(float threshold, cuda::Address scratch);
  // The address of the resulting number of rows, a uint32.
  cuda::Address rows() const { return cuda::AddressOf(cuts_.all_rows); }
  // Queues the removal of the selected values, as in `TakeRows`.
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
  bool keeps_ = false;  // whether unsent values are kept
  device::Cuts cuts_{};
};

}  // namespace tfdist
