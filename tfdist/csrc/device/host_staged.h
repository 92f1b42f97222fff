// Collectives of device memory that pass through the host, messages by copies, and exact sums.
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

// Sends messages between the two GPUs of a group by copies. The sender's GPU writes to the staging
// buffers of the receiver, so no kernel waits for another kernel.
class MessageCopies {
 public:
  // Args: rank: this rank; buffer_bytes: the size of each of the two staging buffers; guard: ends
  // waits early.
  MessageCopies(DeviceRank& rank, size_t buffer_bytes, Guard& guard);

  // Sends or receives a message, and waits until the message is complete. Both ranks call this
  // function with matching operations, after they have synchronized.
  // Args: staging: the address of the receiver's staging buffers, as seen by this rank's GPU.
  void Run(Fabric& fabric, const Operation& operation, cuda::Address staging);

 private:
  void Launch(const Operation& operation, size_t chunk, cuda::Address staging);
  void AwaitChunk(size_t chunk);

  DeviceRank& rank_;
  const size_t slot_bytes_;
  Guard& guard_;
  std::deque<DeviceEvent> copied_;  // one for each slot
};

// Rounds a size up to a multiple of the size of a kernel's vectors.
inline size_t Aligned(size_t bytes) {
  return (bytes + device::kVectorBytes - 1) / device::kVectorBytes * device::kVectorBytes;
}

// Computes exact sums over the GPUs of a host or of a process, before the sums are encoded. The
// values are divided into shares. Each GPU receives the values of one share from all these GPUs
// through NCCL, and sums them in the order of the ranks.
class ExactShares {
 public:
  // Args: groups: a topology in which each "host" is a group of ranks with an exact sum; part: this
  // rank's part of the operation.
  ExactShares(const Topology& groups, const Operation& part);

  // `LargestShare` is the size of the largest share. `Bytes` is the size of the device memory that
  // is needed. Both are the same on all ranks.
  size_t LargestShare() const { return largest_; }
  size_t Bytes() const { return slots_ * slot_; }

  // The following functions queue their work in the rank's stream, and use `Bytes()` bytes of
  // memory. `ExchangeValues` and `ExchangeSums` must be called for all ranks of a process together.
  void Begin(const DeviceRank& rank, cuda::Address memory);
  void ExchangeValues() const;
  // Args: ended: the address of a word on the GPU that is 0.
  void AddUp(cuda::Address ended) const;
  void ExchangeSums() const;

  // Whether this rank has a share, the offset of this share, and the sums of its values after
  // `AddUp`.
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

  const std::vector<KernelAllReduce::Tensor> tensors_;  // divided in the same way on all ranks
  const std::vector<int> ranks_;                        // the ranks of this group
  const size_t me_;                                     // this rank's position in the group
  std::vector<size_t> sizes_;                           // size of each rank's share in bytes
  size_t largest_ = 0, slot_ = 0, slots_ = 0;
  const DeviceRank* rank_ = nullptr;
  cuda::Address memory_ = 0;
};

// Runs collectives of device memory through host memory. This works with any GPU.
class HostStaged {
 public:
  // A function that runs an operation on host memory.
  using OnHost = std::function<void(Operation&)>;

  // Args: gpus: the GPUs of this process; guard: ends waits early.
  HostStaged(const std::vector<std::shared_ptr<const Gpu>>& gpus, Guard& guard);

  // Runs an operation on device memory. An all-reduce is pipelined in chunks: while one chunk is
  // reduced, the next chunk is copied to the host, and the previous chunk is copied back. If the
  // process has several GPUs, their parts are first combined on the host. Messages and all-to-alls
  // require that each process has a single GPU.
  // Args: parts: the parts of the GPUs.
  void Run(const Operation& operation, const Parts& parts, const OnHost& on_host);

 private:
  static constexpr size_t kChunks = 3;
  // The copies of one GPU to the host and back.
  struct Lane {
    explicit Lane(const Gpu& gpu);
    // Creates the chunks, unless they already exist.
    void MakeChunks();
    // Makes both copy streams wait until the memory of the part may be used.
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
