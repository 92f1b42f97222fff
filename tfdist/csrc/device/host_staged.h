// Collectives of device memory through the host.
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

// Messages between the two GPUs of a group by copies: the sender's GPU writes to the receiver's
// staging buffers, so no kernel waits for another one.
class MessageCopies {
 public:
  // Args: this rank; the size of each of the two staging buffers; a guard that ends waits early.
  MessageCopies(DeviceRank& rank, size_t buffer_bytes, Guard& guard);

  // Sends or receives a message, and waits until it is complete. Both ranks call this with matching
  // operations, after they have synchronized. Args: the receiver's staging buffers as seen by this
  // rank.
  void Run(Fabric& fabric, const Operation& operation, cuda::Address staging);

 private:
  void Launch(const Operation& operation, size_t chunk, cuda::Address staging);
  void AwaitChunk(size_t chunk);

  DeviceRank& rank_;
  const size_t slot_bytes_;
  Guard& guard_;
  std::deque<DeviceEvent> copied_;  // one per slot
};

// Rounds up to a multiple of the unit that kernels move.
inline size_t Aligned(size_t bytes) {
  return (bytes + device::kVectorBytes - 1) / device::kVectorBytes * device::kVectorBytes;
}

// Exact sums over the GPUs of one host or process, before sums are encoded: each GPU receives a
// share of the values through NCCL and sums it in the ranks' order.
class ExactShares {
 public:
  // Args: groups: the ranks, grouped by "host" for the sums; part: this rank's part.
  ExactShares(const Topology& groups, const Operation& part);

  // The size of the largest share, and the total device memory; the same on all ranks.
  size_t LargestShare() const { return largest_; }
  size_t Bytes() const { return slots_ * slot_; }

  // These queue their work in the rank's stream, and use `Bytes()` bytes of memory. The exchanges
  // are called for all ranks of a process together.
  void Begin(const DeviceRank& rank, cuda::Address memory);
  void ExchangeValues() const;
  // Args: ended: a word of the GPU that is zero.
  void AddUp(cuda::Address ended) const;
  void ExchangeSums() const;

  // This rank's share: whether it has one, its values, and, after summation, the sums.
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

  const std::vector<KernelAllReduce::Tensor> tensors_;  // cut alike on all ranks
  const std::vector<int> ranks_;                        // of this group
  const size_t me_;                                     // this rank's position in it
  std::vector<size_t> sizes_;                           // bytes of each rank's share
  size_t largest_ = 0, slot_ = 0, slots_ = 0;
  const DeviceRank* rank_ = nullptr;
  cuda::Address memory_ = 0;
};

// Collectives of device memory through host memory: available for any GPU.
class HostStaged {
 public:
  // Runs an operation on host memory.
  using OnHost = std::function<void(Operation&)>;

  // Args: this process's GPUs, and a guard that ends waits early.
  HostStaged(const std::vector<std::shared_ptr<const Gpu>>& gpus, Guard& guard);

  // Runs an operation on device memory. An all-reduce is pipelined in chunks: one is reduced while
  // the next is copied to the host and the previous one back. The parts of several GPUs are first
  // combined on the host; messages and all-to-alls require a single GPU per process. Args: the
  // GPUs' parts.
  void Run(const Operation& operation, const Parts& parts, const OnHost& on_host);

 private:
  static constexpr size_t kChunks = 3;
  // One GPU's copies to the host and back.
  struct Lane {
    explicit Lane(const Gpu& gpu);
    // Creates the chunks on first use.
    void MakeChunks();
    // Makes both copy streams wait until the part's memory may be used.
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
