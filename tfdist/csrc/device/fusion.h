// Fuses small tensors into one buffer, and divides tensors into tiles.
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

// Divides an operation's tensors into the lists that kernels are launched with.
//
// Args: tensors: their `first` and `first_tile` are set here.
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

// The number of blocks for one half-warp per item.
inline unsigned BlocksForHalfWarps(uint64_t things) {
  return BlocksFor(things * device::kHalfWarp, kMaxBlocksAlone);
}

// The division of a bucket's tensors: large ones separately, the others in lists.
struct Fused {
  std::vector<KernelAllReduce::Tensor> alone;
  std::vector<device::List> lists;  // each fits the buffer
};
Fused Fuse(const std::vector<KernelAllReduce::Tensor>& tensors, size_t buffer_bytes);

// A buffer registered with NCCL. Small tensors are packed into it, reduced in one call, and
// unpacked.
class FusionBuffer {
 public:
  // Args: kernels and NCCL group to use, which must outlive this object.
  FusionBuffer(const Gpu& gpu, const KernelModule& kernels, NcclGroup& nccl, size_t bytes);
  ~FusionBuffer();
  FusionBuffer(const FusionBuffer&) = delete;
  FusionBuffer& operator=(const FusionBuffer&) = delete;

  cuda::Address address() const { return address_; }
  bool is_from_nccl() const { return !plain_; }
  // Copies a list's tensors to the buffer, and results from the buffer to the list's outputs.
  void Pack(const device::List& list, cuda::Stream* stream) const;
  void Unpack(const device::List& list, cuda::Stream* stream) const;

 private:
  void Launch(const char* kernel, const device::List& list, cuda::Stream* stream) const;

  const Gpu& gpu_;
  const KernelModule& kernels_;
  NcclGroup& nccl_;
  const DeviceMemory ended_;             // zero, so that kernels never give up
  std::unique_ptr<DeviceMemory> plain_;  // if NCCL cannot allocate
  cuda::Address address_ = 0;
};

}  // namespace tfdist
