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
// the other GPUs. Either the kernels themselves wait for the other ranks, or the stream waits for
// the other ranks between two kernels.
class KernelAllReduce {
 public:
  // The address and the size of a tensor, and the address of its result. Both addresses refer to
  // device memory.
  struct Tensor {
    cuda::Address in;
    cuda::Address out;
    size_t bytes;
  };
  // The memory of one rank that the other ranks access.
  struct Shared {
    cuda::Address staging;  // `StagingBytes` bytes
    cuda::Address words;    // kWordBytes
  };
  struct Setup {
    const Gpu* gpu;
    const KernelModule* kernels;
    uint32_t rank;
    // The memory of each rank, with the addresses at which this rank's GPU accesses it. There are
    // at most kMaxRanks ranks.
    std::vector<Shared> ranks;
    // The size of each of the two staging buffers, in bytes. It is a multiple of 16, and the same
    // on all ranks.
    size_t buffer_bytes;
    // Data up to this size are reduced in one shot, if kernels wait for other ranks (see
    // `kernels/all_reduce.cu`). The default has not been tuned.
    size_t one_shot_bytes = 1 << 16;
    // The time limit of each wait in a kernel, and of each wait in `Launch`.
    double timeout_seconds = 600;
    // The barriers with which streams wait for other ranks. Null if kernels wait instead.
    StreamBarriers* stream_barriers = nullptr;
  };
  static constexpr size_t kWordBytes = device::kBarrierWords * sizeof(uint64_t);
  static constexpr size_t StagingBytes(size_t buffer_bytes) { return 2 * buffer_bytes; }

  explicit KernelAllReduce(Setup setup);

  // Queues an all-reduce of tensors, which must have the same sizes on all ranks. If kernels wait
  // for other ranks, returns immediately. If streams wait instead, first waits until only a few
  // launches are pending. During this wait, `guard` is checked, and can end the wait by throwing an
  // Error.
  void Launch(const std::vector<Tensor>& tensors, DType type, ReduceOp op, cuda::Stream* stream,
              Guard& guard);

  // Ends all waits for other ranks. Kernels that have not begun will return without any effect. May
  // be called from any thread.
  void Abort() noexcept;
  // Returns kRunning if no wait for other ranks has failed. Otherwise, returns why a wait has
  // failed; later launches then have no effect. The result is final when the stream has finished
  // its work.
  device::Outcome outcome() const;

 private:
  void LaunchList(const device::List& list, DType type, ReduceOp op, cuda::Stream* stream);
  void SyncRanks(cuda::Stream* stream);
  void AwaitRoom(cuda::Stream* stream, Guard& guard);

  const Setup setup_;
  // Two words in host memory: whether the kernels must give up, and the outcome of the waits.
  MappedMemory host_;
  // A word in device memory, which is not 0 after a wait has failed.
  DeviceMemory ended_;
  // A second stream, in which `Abort` writes to `ended_` while the kernels of the first stream
  // wait.
  DeviceStream aside_;
  device::Waiting waiting_{};
  device::Staging staging_{};
  device::KernelBarrier barrier_{};
  size_t turn_ = 0;
  // If streams wait: an event that was recorded some launches ago. `Launch` waits for this event.
  DeviceEvent room_;
  size_t launches_ = 0;
};

// Returns the names of the kernels that `KernelCodec` uses.
std::vector<const char*> CodecKernelNames();

// Encodes, sums and decodes values with kernels. All addresses refer to device memory.
class KernelCodec {
 public:
  KernelCodec(const KernelModule& kernels, cuda::Stream* stream)
      : kernels_(kernels), stream_(stream) {}
  static constexpr size_t RoomBytes(size_t values) {
    return device::kRooms * values * sizeof(float);
  }

  // Each of these functions queues its work in the stream and returns immediately.
  // Args: error: the position of the values in the residual, or a position in an empty run if there
  // is no error feedback; room: the address of scratch memory of `RoomBytes(n)` bytes, where n is
  // the number of values.
  void Encode(const device::Batch& batch, const device::Place& in, const device::Place& error,
              cuda::Address room, cuda::Address to) const;
  void Decode(const Codec& codec, size_t count, cuda::Address from, const device::Place& out,
              cuda::Address room) const;
  // Sums the values of all members. This member's own values are read from `in`, without being
  // encoded first. Encodes the sums with the codec of `batch`, and decodes the encoded sums into
  // `out`.
  // Args: votes: whether each sum is replaced with its sign, so that the majority of the members
  // decides.
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

// Sums the rows of all ranks into tensors. This class does the same as `SumRows` on the CPU, but
// with kernels. The results are bitwise identical. All addresses refer to device memory.
class KernelScatter {
 public:
  // Args: ranks: the number of ranks from which the rows have been received. The rows of each rank
  // must be contiguous.
  KernelScatter(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream, size_t ranks)
      : gpu_(gpu), kernels_(kernels), stream_(stream), ranks_(ranks) {}

  // Returns the size of the scratch memory for `Sum`. The memory must remain allocated until the
  // stream has finished its work.
  size_t ScratchBytes() const;
  // Queues the same computation that `SumRows` does, and returns immediately. A kernel cannot throw
  // an error. If rows are invalid, for example because an index is out of range, it therefore sets
  // all sums to NaN.
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

// Uses kernels to select the values of a sparse gradient that will be sent. The results are bitwise
// identical to the results of the functions in `sparse/select.h`, which run on the CPU. All
// addresses refer to device memory.
class KernelSelect {
 public:
  // Args: all: the candidates of each tensor. The total number of candidates must be smaller than
  // `kMaxCandidates`.
  KernelSelect(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream,
               const std::vector<Candidates>& all);

  // Returns the size of the scratch memory. The memory must remain allocated from the first call
  // until the stream has finished the work of the last call.
  size_t ScratchBytes() const;

  // `FindLargest` queues the same work that `SelectLargest` does on the CPU, and `FindAbove` queues
  // the work of `SelectAbove`: they update the residuals and the momentum, and select values. Both
  // functions return immediately.
  // Args: selected: the number of values to select from each tensor.
  void FindLargest(const std::vector<size_t>& selected, cuda::Address scratch);
  void FindAbove(float threshold, cuda::Address scratch);
  // Returns the address of a uint32, which will contain the number of selected values.
  cuda::Address rows() const { return cuda::AddressOf(cuts_.all_rows); }
  // Queues the same work that `TakeRows` does on the CPU.
  // Args: rows: memory for the selected values and their indices.
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
  // Whether any tensor has a residual, which keeps the values that are not selected.
  bool keeps_ = false;
  device::Cuts cuts_{};
};

}  // namespace tfdist
