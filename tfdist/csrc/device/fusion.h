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

// Divides the tensors of an operation into lists, with which kernels are launched.
//
// Args: tensors: the function sets `first` and `first_tile` of the tensors in the lists.
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

// Returns the number of blocks if one half-warp handles each item.
inline unsigned BlocksForHalfWarps(uint64_t things) {
  return BlocksFor(things * device::kHalfWarp, kMaxBlocksAlone);
}

// The tensors of a bucket: large tensors, which are reduced separately, and lists of small tensors.
struct Fused {
  std::vector<KernelAllReduce::Tensor> alone;
  std::vector<device::List> lists;  // each list fits into the buffer
};
Fused Fuse(const std::vector<KernelAllReduce::Tensor>& tensors, size_t buffer_bytes);

// A buffer that is registered with NCCL. Small tensors are packed into this buffer, reduced in one
// call, and unpacked.
class FusionBuffer {
 public:
  // Args: kernels, nccl: the kernels and the NCCL group to use. They must outlive this object.
  FusionBuffer(const Gpu& gpu, const KernelModule& kernels, NcclGroup& nccl, size_t bytes);
  ~FusionBuffer();
  FusionBuffer(const FusionBuffer&) = delete;
  FusionBuffer& operator=(const FusionBuffer&) = delete;

  cuda::Address address() const { return address_; }
  bool is_from_nccl() const { return !plain_; }
  // `Pack` copies the tensors of a list to the buffer. `Unpack` copies the results from the buffer
  // to the outputs of the list.
  void Pack(const device::List& list, cuda::Stream* stream) const;
  void Unpack(const device::List& list, cuda::Stream* stream) const;

 private:
  void Launch(const char* kernel, const device::List& list, cuda::Stream* stream) const;

  const Gpu& gpu_;
  const KernelModule& kernels_;
  NcclGroup& nccl_;
  const DeviceMemory ended_;             // always 0, so that kernels never give up
  std::unique_ptr<DeviceMemory> plain_;  // the buffer, if NCCL cannot allocate it
  cuda::Address address_ = 0;
};

}  // namespace tfdist
