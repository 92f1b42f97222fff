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

// The names of all kernels.
//
// For a `KernelModule`.
std::vector<const char*> KernelNames();

// An all-reduce among the GPUs of one host by our own kernels, which read each other's memory. The
// ranks meet in kernels that wait, or between kernels, while their streams wait.
//
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
    std::vector<Shared> ranks;  // as this rank sees them; at most kMostRanks
    size_t buffer_bytes;        // of each of two buffers: a multiple of 16, the same on all ranks
    size_t one_shot_bytes = 1 << 16;     // up to so many are reduced in one shot; not measured yet
    double timeout_seconds = 600;        // of each wait of a kernel, and of `Launch`
    StreamMeetings* meetings = nullptr;  // where streams wait, not kernels
  };
  static constexpr size_t kWordBytes = device::kMeetingWords * sizeof(uint64_t);
  static constexpr size_t StagingBytes(size_t buffer_bytes) { return 2 * buffer_bytes; }

  explicit KernelAllReduce(Setup setup);

  // Has a stream reduce tensors, of the same sizes on all ranks; returns at once. Where streams
  // wait, until they are told not to, it first waits until few launches are left, or the guard ends
  // that.
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

// Encodes, sums and decodes by kernels. All memory is on the GPU.
//
// The names of its kernels.
std::vector<const char*> CodecKernelNames();

class KernelCodec {
 public:
  // Args: room: as much as `RoomBytes` says of the most values that are given at once.
  KernelCodec(const KernelModule& kernels, cuda::Stream* stream)
      : kernels_(kernels), stream_(stream) {}
  static constexpr size_t RoomBytes(size_t values) {
    return device::kRooms * values * sizeof(float);
  }

  // Each has the stream do its work, and returns at once. Args: error: a run of none for no
  // feedback.
  void Encode(const device::Batch& batch, const device::Place& in, const device::Place& error,
              cuda::Address room, cuda::Address to) const;
  void Decode(const Codec& codec, size_t count, cuda::Address from, const device::Place& out,
              cuda::Address room) const;
  // Everyone's values, of which the own are `in`, encoded again by the codec of the batch, and
  // decoded into `out`. Args: votes: whether a sum is the sign that most values have.
  void Sum(const device::Batch& batch, const device::Arrived& arrived, bool votes,
           const device::Place& in, const device::Place& error, const device::Place& out,
           cuda::Address room, cuda::Address to) const;

 private:
  template <typename... Arguments>
  void Launch(const std::string& name, size_t count, uint32_t block, Arguments... arguments) const;

  const KernelModule& kernels_;
  cuda::Stream* const stream_;
};

// Sums the rows of all ranks into tensors by kernels, to the bits of the processor. All memory is
// on the GPU.
//
// The names of its kernels.
std::vector<const char*> ScatterKernelNames();

class KernelScatter {
 public:
  // Args: ranks: whose rows there are, one rank's behind the other's.
  KernelScatter(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream, size_t ranks)
      : gpu_(gpu), kernels_(kernels), stream_(stream), ranks_(ranks) {}

  // What it needs until the stream has passed its work.
  size_t ScratchBytes() const;
  // Has the stream sum as `SumRows` does, and returns at once. Rows that ranks do not send, such as
  // of an index of no value, make all sums NaN.
  void Sum(const Row* rows, size_t count, const std::vector<RowSums>& tensors,
           cuda::Address scratch) const;

 private:
  const Gpu& gpu_;
  const KernelModule& kernels_;
  cuda::Stream* const stream_;
  const size_t ranks_;
};

// Selects the values of a sparse gradient by kernels, to the bits of the processor. All memory is
// on the GPU.
//
// The names of its kernels.
std::vector<const char*> SelectKernelNames();

class KernelSelect {
 public:
  // Args: all: each tensor's; fewer than `kMostCandidates` all together.
  KernelSelect(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream,
               const std::vector<Candidates>& all);

  // What it needs from the first call until the stream has passed the last one's work.
  size_t ScratchBytes() const;

  // Has the stream bring what is kept up to date and find what to select, as `SelectLargest` and
  // `SelectAbove` do, and returns at once.
  // Args: selected: how many of each tensor.
  void FindLargest(const std::vector<size_t>& selected, cuda::Address scratch);
  void FindAbove(float threshold, cuda::Address scratch);
  // Where the number of rows is then, a uint32.
  cuda::Address rows() const { return cuda::AddressOf(cuts_.all_rows); }
  // Has the stream take what was found, as `TakeRows` does.
  void Take(Row* rows);

 private:
  void Begin(uint32_t magnitude, cuda::Address scratch);
  void Fill(const void* from, uint32_t value, size_t words) const;
  void Count(bool accumulates);
  template <typename... Arguments>
  void Launch(const char* name, uint64_t teams, Arguments... arguments) const;

  const Gpu& gpu_;
  const KernelModule& kernels_;
  cuda::Stream* const stream_;
  std::vector<device::Sources> lists_;
  uint32_t tensors_ = 0;
  size_t tiles_ = 0;
  bool keeps_ = false;  // what is not sent
  device::Cuts cuts_{};
};

}  // namespace tfdist
