// What GPUs of one host, or of one process, sum exactly before sums are encoded: each sums a share of
// the values, which come to it by NCCL, in the ranks' order.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/operation.h"
#include "device/device_rank.h"
#include "device/parts.h"
#include "pieces.h"
#include "transport/fabric.h"

namespace tfdist {

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
  const std::vector<int> ranks_;  // of this group
  const size_t me_;               // this rank's place in it
  std::vector<size_t> sizes_;     // bytes of each one's share
  size_t largest_ = 0, slot_ = 0, slots_ = 0;
  const DeviceRank* rank_ = nullptr;
  cuda::Address memory_ = 0;
};

}  // namespace tfdist
