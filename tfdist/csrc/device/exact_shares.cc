#include "device/exact_shares.h"

#include <algorithm>

#include "collective/transfer.h"
#include "device/grid.h"
#include "device/kernels/staging.h"

namespace tfdist {
namespace {

using Tensor = KernelAllReduce::Tensor;

constexpr size_t kFloat = sizeof(float);

}  // namespace

ExactShares::ExactShares(const Topology& groups, const Operation& part)
    : tensors_(TensorsOf(part)),
      ranks_(groups.my_host()),
      me_(static_cast<size_t>(groups.my_place())) {
  size_t owners = ranks_.size();
  for (const auto& group : groups.hosts) {
    owners = std::min(owners, group.size());
    slots_ = std::max(slots_, group.size());
  }
  sizes_ = CutEvenly(part.in.bytes(), kFloat, static_cast<int>(owners),
                     static_cast<int>(ranks_.size()));
  largest_ = *std::max_element(sizes_.begin(), sizes_.end());
  slot_ = Aligned(largest_);
}

size_t ExactShares::Begins(size_t place) const {
  size_t begin = 0;
  for (size_t before = 0; before < place; ++before) begin += Size(before);
  return begin;
}

void ExactShares::Begin(const DeviceRank& rank, cuda::Address memory) {
  rank_ = &rank;
  memory_ = memory;
}

// Calls `use(tensor)` for each piece of a share. Tensors are not packed: each piece is a message.
template <typename Use>
void ExactShares::ForTensors(size_t place, Use use) const {
  const size_t first = Begins(place), behind = first + Size(place);
  size_t begin = 0;
  for (const KernelAllReduce::Tensor& tensor : tensors_) {
    const size_t from = std::max(begin, first), to = std::min(begin + tensor.bytes, behind);
    if (from < to) use({tensor.in + (from - begin), tensor.out + (from - begin), to - from});
    begin += tensor.bytes;
  }
}

void ExactShares::ExchangeValues() const {
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place != me_) {
      ForTensors(place, [&](const Tensor& tensor) { Send(tensor.in, tensor.bytes, place); });
    }
    cuda::Address to = Slot(place);
    ForTensors(me_, [&](const Tensor& tensor) {
      if (place == me_) {
        rank_->stream.Copy(to, tensor.in, tensor.bytes);
      } else {
        Receive(to, tensor.bytes, place);
      }
      to += tensor.bytes;
    });
  }
}

// Into the first one's slot, by the kernel that reduces staging buffers.
void ExactShares::AddUp(cuda::Address ended) const {
  if (ranks_.size() == 1 || !HasShare()) return;
  device::Staging staging{};
  for (size_t place = 0; place < ranks_.size(); ++place) {
    staging.of[place] = cuda::PointerTo<char>(Slot(place));
  }
  staging.ranks = static_cast<uint32_t>(ranks_.size());
  staging.part = slot_ / device::kVectorBytes;
  device::Waiting waiting{};
  waiting.ended = cuda::PointerTo<uint64_t>(ended);
  rank_->kernels->Launch("tfdist_reduce_float32_sum", BlocksFor(staging.part, kMostBlocksAlone),
                         kKernelThreads, rank_->stream.get(), staging.part, staging, waiting, 1.0);
}

void ExactShares::ExchangeSums() const {
  for (size_t place = 0; place < ranks_.size(); ++place) {
    cuda::Address from = Slot(0);
    ForTensors(me_, [&](const Tensor& tensor) {
      if (place == me_) {
        rank_->stream.Copy(tensor.out, from, tensor.bytes);
      } else {
        Send(from, tensor.bytes, place);
      }
      from += tensor.bytes;
    });
    if (place != me_) {
      ForTensors(place, [&](const Tensor& tensor) { Receive(tensor.out, tensor.bytes, place); });
    }
  }
}

void ExactShares::Send(cuda::Address from, size_t bytes, size_t place) const {
  rank_->nccl->Send(from, bytes, DType::kUint8, ranks_[place], rank_->stream.get());
}

void ExactShares::Receive(cuda::Address to, size_t bytes, size_t place) const {
  rank_->nccl->Recv(to, bytes, DType::kUint8, ranks_[place], rank_->stream.get());
}

}  // namespace tfdist
