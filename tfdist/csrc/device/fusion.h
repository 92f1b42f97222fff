// Small tensors that go through NCCL in one call: packed into a buffer that NCCL knows, and unpacked.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device/gpu.h"
#include "device/kernel_all_reduce.h"
#include "device/nccl_group.h"

namespace tfdist {

// How the tensors of a bucket go: those that are large by themselves, the others in lists.
struct Fused {
  std::vector<KernelAllReduce::Tensor> alone;
  std::vector<device::List> lists;  // none with more than the buffer holds
};
Fused Fuse(const std::vector<KernelAllReduce::Tensor>& tensors, size_t buffer_bytes);

class FusionBuffer {
 public:
  // Args: what it goes through, which must live as long.
  FusionBuffer(const Gpu& gpu, const KernelModule& kernels, NcclGroup& nccl, size_t bytes);
  ~FusionBuffer();
  FusionBuffer(const FusionBuffer&) = delete;
  FusionBuffer& operator=(const FusionBuffer&) = delete;

  cuda::Address address() const { return address_; }
  bool is_from_nccl() const { return !plain_; }
  // Copies a list's tensors to the buffer, and the results from there.
  void Pack(const device::List& list, cuda::Stream* stream) const;
  void Unpack(const device::List& list, cuda::Stream* stream) const;

 private:
  void Launch(const char* kernel, const device::List& list, cuda::Stream* stream) const;

  const Gpu& gpu_;
  const KernelModule& kernels_;
  NcclGroup& nccl_;
  const DeviceMemory ended_;  // zero: nobody gives up
  std::unique_ptr<DeviceMemory> plain_;  // where NCCL has no memory of its own to give
  cuda::Address address_ = 0;
};

}  // namespace tfdist
