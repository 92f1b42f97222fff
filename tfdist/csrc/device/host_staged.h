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

// Messages between the two GPUs of a group, by copies: the sender's GPU writes to the receiver's
// staging buffers, so no kernel waits for another one.
class MessageCopies {
 public:
  // Args: this rank; the bytes of each of the two staging buffers; what ends waits early.
  MessageCopies(DeviceRank& rank, size_t buffer_bytes, Guard& guard);

  // Sends or receives, and waits for the end. Called by both ranks together, whose operations
  // match, after they have met. Args: what this rank sees of the receiver's staging buffers.
  void Run(Fabric& fabric, const Operation& operation, cuda::Address staging);

 private:
  void Launch(const Operation& operation, size_t chunk, cuda::Address staging);
  void AwaitChunk(size_t chunk);

  DeviceRank& rank_;
  const size_t slot_bytes_;
  Guard& guard_;
  std::deque<DeviceEvent> copied_;  // of each slot
};

// What GPUs of one host, or of one process, sum exactly before sums are encoded: each sums a share
// of the values, which come to it by NCCL, in the ranks' order.
//
// The next multiple of what kernels move at once.
inline size_t Aligned(size_t bytes) {
  return (bytes + device::kVectorBytes - 1) / device::kVectorBytes * device::kVectorBytes;
}

class ExactShares {
 public:
  // Args: groups: the ranks, on whose "hosts" is summed; part: what this rank brings.
  ExactShares(const Topology& groups, const Operation& part);

  // Bytes of the largest share, and what all of this takes on the GPU: the same for all ranks.
  size_t LargestShare() const { return largest_; }
  size_t Bytes() const { return slots_ * slot_; }

  // Has the rank's stream do the work, in memory of so many bytes. What exchanges is called for all
  // ranks of a process at once.
  void Begin(const DeviceRank& rank, cuda::Address memory);
  void ExchangeValues() const;
  // Args: ended: a word of the GPU that is zero.
  void AddUp(cuda::Address ended) const;
  void ExchangeSums() const;

  // This rank's share: whether it has one, which values it is of, and once added up, the sums.
  bool HasShare() const { return Size(me_) > 0; }
  size_t begin() const { return Begins(me_); }
  Pieces sums() const { return Pieces(reinterpret_cast<char*>(Slot(0)), Size(me_)); }

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
  const size_t me_;                                     // this rank's place in it
  std::vector<size_t> sizes_;                           // bytes of each one's share
  size_t largest_ = 0, slot_ = 0, slots_ = 0;
  const DeviceRank* rank_ = nullptr;
  cuda::Address memory_ = 0;
};

// Collectives of what is on GPUs, through the host's memory: there wherever a GPU is.
class HostStaged {
 public:
  // Runs an operation whose memory is the host's.
  using OnHost = std::function<void(Operation&)>;

  // Args: this process's GPUs, and what ends waits early.
  HostStaged(const std::vector<std::shared_ptr<const Gpu>>& gpus, Guard& guard);

  // Runs an operation whose memory is the GPUs'. An all-reduce goes in chunks, so that one is
  // reduced while the next comes and the last goes back. What several GPUs bring is put together on
  // the host first; messages and all-to-alls are for processes with one. Args: what each GPU
  // brings.
  void Run(const Operation& operation, const Parts& parts, const OnHost& on_host);

 private:
  static constexpr size_t kChunks = 3;
  // One GPU's copies to the host and back.
  struct Lane {
    explicit Lane(const Gpu& gpu);
    // When they are needed first.
    void MakeChunks();
    // Has what copies either way wait for the GPU's values, and for room for them.
    void HoldBack(const Operation& part) const;
    void Fetch(const ConstPieces& from, size_t begin, size_t bytes, char* to) const;
    void Return(const char* from, const Pieces& to, size_t begin, size_t bytes) const;

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
