// Packs small tensors together into one buffer, and divides tensors into tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "device/kernels/tiles.h"
#include "device/nccl_group.h"

namespace tfdist {

// Divides the tensors of an operation into lists. A kernel is launched once for each list.
//
// Args: tensors: the tensors of the operation. In the returned lists, the members `first` and
// `first_tile` of these tensors are set.
template <typename T>
std::vector<device::TiledList<T>> Tiled(const std::vector<T>& tensors) {
  std::vector<device::TiledList<T>> lists;
  uint32_t number = 0, first = 0, first_tile = 0;
  for (T tensor : tensors) {
    if (lists.empty() || lists.back().count == lists.back().kMax) {
      lists.push_back({0, number, first_tile, 0, {}});
    }
    tensor.first = first;
    tensor.first_tile = first_tile;
    device::TiledList<T>& list = lists.back();
    list.tensors[list.count++] = tensor;
    list.tiles += device::TilesOf(tensor.count);
    first += tensor.count;
    first_tile += device::TilesOf(tensor.count);
    ++number;
  }
  return lists;
}

// Returns the number of blocks for a kernel in which a half-warp handles each of `things` items.
inline unsigned BlocksForHalfWarps(uint64_t things) {
  return BlocksFor(things * device::kHalfWarp, kMaxBlocksAlone);
}

// The tensors of a bucket: the large tensors, each of which is reduced separately, and lists of
// small tensors. The tensors of a list are packed into a buffer and reduced together.
struct Fused {
  std::vector<KernelAllReduce::Tensor> alone;
  std::vector<device::List> lists;  // the packed tensors of each list fit into the buffer
};
Fused Fuse(const std::vector<KernelAllReduce::Tensor>& tensors, size_t buffer_bytes);

// A buffer for small tensors. They are packed into the buffer, reduced in one call of NCCL, and
// unpacked. If NCCL can allocate the buffer, NCCL can also use it without copies (see
// `NcclGroup::Allocate`).
class FusionBuffer {
 public:
  // Args: kernels, nccl: the kernels and the NCCL group that this object uses. They must outlive
  // this object.
  FusionBuffer(const Gpu& gpu, const KernelModule& kernels, NcclGroup& nccl, size_t bytes);
  ~FusionBuffer();
  FusionBuffer(const FusionBuffer&) = delete;
  FusionBuffer& operator=(const FusionBuffer&) = delete;

  cuda::Address address() const { return address_; }
  bool is_from_nccl() const { return !plain_; }
  // `Pack` copies the tensors of a list into the buffer. `Unpack` copies the results from the
  // buffer to the outputs of the tensors. Both functions only queue the copies in the stream.
  void Pack(const device::List& list, cuda::Stream* stream) const;
  void Unpack(const device::List& list, cuda::Stream* stream) const;

 private:
  void Launch(const char* kernel, const device::List& list, cuda::Stream* stream) const;

  const Gpu& gpu_;
  const KernelModule& kernels_;
  NcclGroup& nccl_;
  // The kernels give up if this word is not 0. It is always 0, because the kernels of this class do
  // not wait for other ranks.
  const DeviceMemory ended_;
  // The memory of the buffer if NCCL cannot allocate it; otherwise null.
  std::unique_ptr<DeviceMemory> plain_;
  cuda::Address address_ = 0;
};

}  // namespace tfdist
