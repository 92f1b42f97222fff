// Runs collectives of device memory through host memory, sends messages by copies between GPUs, and
// computes the exact sums of compressed all-reduces.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "collective/operation.h"
#include "device/device_rank.h"
#include "device/device_setup.h"
#include "device/gpu.h"
#include "error.h"
#include "memory.h"
#include "transport/fabric.h"

namespace tfdist {

// Sends messages between the two GPUs of a group by copies. The sender's GPU copies the message to
// the receiver's staging buffers. From there, the receiver's GPU copies the message to its
// destination. The two processes synchronize between these copies, so that no kernel needs to wait
// for another kernel.
class MessageCopies {
 public:
  // Args: rank: this rank; buffer_bytes: the size of each of the two staging buffers; guard: a
  // `Guard` that is checked during every wait, and can end the wait by throwing an Error.
  MessageCopies(DeviceRank& rank, size_t buffer_bytes, Guard& guard);

  // Sends or receives a message, and waits until the transfer is complete. Both ranks call this
  // function, after they have synchronized: one rank with a send, and the other rank with the
  // matching receive.
  // Args: staging: the address at which this rank's GPU accesses the receiver's staging buffers.
  void Run(Fabric& fabric, const Operation& operation, cuda::Address staging);

 private:
  void Launch(const Operation& operation, size_t chunk, cuda::Address staging);
  void AwaitChunk(size_t chunk);

  DeviceRank& rank_;
  const size_t slot_bytes_;
  Guard& guard_;
  // For each slot, an event that passes when the last copy to or from this slot has ended.
  std::deque<DeviceEvent> copied_;
};

// Rounds a size up to a multiple of 16 bytes, which is the size of the vectors in kernels.
inline size_t Aligned(size_t bytes) {
  return (bytes + device::kVectorBytes - 1) / device::kVectorBytes * device::kVectorBytes;
}

// Sums the values within groups of GPUs, before a compressed all-reduce of these sums between the
// groups. The sums are exact, because the values are not encoded before they are summed. A group
// consists of the GPUs of a host or of a process.
//
// The values are divided into shares. Through NCCL, a GPU receives the values of one share from all
// GPUs of its group. It sums these values in the order of the ranks.
class ExactShares {
 public:
  // Args: groups: a topology in which the ranks of each group form a "host"; part: this rank's part
  // of the operation.
  ExactShares(const Topology& groups, const Operation& part);

  // `LargestShare` returns the size of the largest share, and `Bytes` returns the size of the
  // device memory that this object needs. Both sizes are in bytes, and the same on all ranks.
  size_t LargestShare() const { return largest_; }
  size_t Bytes() const { return slots_ * slot_; }

  // The following functions queue work in the stream of `rank`, which uses `Bytes()` bytes at the
  // address `memory`. `ExchangeValues` must be called for all ranks of a process within one call of
  // `NcclGroup::Grouped`, and so must `ExchangeSums`.
  void Begin(const DeviceRank& rank, cuda::Address memory);
  void ExchangeValues() const;
  // Args: ended: the address of a device word with the value 0, which tells the kernel not to give
  // up.
  void AddUp(cuda::Address ended) const;
  void ExchangeSums() const;

  // `HasShare` returns whether this rank has a share. If groups have different sizes, some ranks of
  // the larger groups have none. `begin` returns the offset of the share in the operation's data,
  // in bytes. `sums` returns the memory that contains the sums of the share after `AddUp`.
  bool HasShare() const { return Size(me_) > 0; }
  size_t begin() const { return Begins(me_); }
  BufferList sums() const { return BufferList(reinterpret_cast<char*>(Slot(0)), Size(me_)); }

 private:
  template <typename Use>
  void ForTensors(size_t place, Use use) const;
  void Send(cuda::Address from, size_t bytes, size_t place) const;
  void Receive(cuda::Address to, size_t bytes, size_t place) const;
  size_t Size(size_t place) const { return sizes_[place]; }
  size_t Begins(size_t place) const;
  cuda::Address Slot(size_t place) const { return memory_ + place * slot_; }

  // The tensors of the operation. All ranks divide them in the same way.
  const std::vector<KernelAllReduce::Tensor> tensors_;
  const std::vector<int> ranks_;  // the ranks of this group, in the topology of all ranks
  const size_t me_;               // the index of this rank in `ranks_`
  std::vector<size_t> sizes_;     // the size of each rank's share, in bytes
  // The size of the largest share, the size of a slot, and the number of slots. During the
  // exchange, a slot contains the values from one rank.
  size_t largest_ = 0, slot_ = 0, slots_ = 0;
  const DeviceRank* rank_ = nullptr;
  cuda::Address memory_ = 0;
};

// Runs collectives of device memory by copying the data to host memory, and the results back. This
// works with any GPU.
class HostStaged {
 public:
  // A function that runs an operation on host memory.
  using OnHost = std::function<void(Operation&)>;

  // Args: gpus: the GPUs of this process; guard: a `Guard` that is checked during every wait, and
  // can end the wait by throwing an Error.
  HostStaged(const std::vector<std::shared_ptr<const Gpu>>& gpus, Guard& guard);

  // Runs an operation on device memory, and waits for its result. An all-reduce is divided into
  // chunks, which are pipelined: while one chunk is reduced, the next chunk is copied to the host,
  // and the result of the previous chunk is copied to the GPU. If the process has several GPUs,
  // their data are first combined on the host. Messages and all-to-alls require that each process
  // has a single GPU.
  // Args: parts: the operation's part for each GPU of this process.
  void Run(const Operation& operation, const Parts& parts, const OnHost& on_host);

 private:
  static constexpr size_t kChunks = 3;
  // Copies the data of one GPU to the host, and the results back to the GPU.
  struct Lane {
    explicit Lane(const Gpu& gpu);
    // Allocates the chunks when it is called for the first time.
    void MakeChunks();
    // Makes both copy streams wait for the event of a part, after which the memory of the part may
    // be used.
    void HoldBack(const Operation& part) const;
    void Fetch(const ConstBufferList& from, size_t begin, size_t bytes, char* to) const;
    void Return(const char* from, const BufferList& to, size_t begin, size_t bytes) const;

    const Gpu& gpu;
    DeviceStream down, up;
    DeviceEvent fetched, returned;
    struct Chunk {
      explicit Chunk(const Gpu& gpu);
      MappedMemory memory;
      DeviceEvent fetched, returned;
    };
    std::unique_ptr<Chunk> chunks[kChunks];
  };

  void InChunks(const Operation& operation, const Parts& parts, const OnHost& on_host);
  void Whole(const Operation& operation, const Parts& parts, const OnHost& on_host);
  char* Take(Growing<MappedMemory>& memory, size_t bytes) const;
  char* FetchAll(const Operation& operation, const Parts& parts, size_t* bytes);
  void Join(const Parts& parts, char* in, size_t* bytes, Operation* staged) const;

  Guard& guard_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  Growing<MappedMemory> in_, out_, error_;
};

}  // namespace tfdist
