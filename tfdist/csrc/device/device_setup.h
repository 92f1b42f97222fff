// The GPUs of a communicator, and their settings.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/kernel_launch.h"

namespace tfdist {

// A communicator's settings for the GPUs of this process.
struct DeviceSetup {
  struct OfGpu {
    int number = 0;       // the index of the GPU among the GPUs visible to this process
    std::string kernels;  // the path of the file with the compiled kernels; "" if there is none
  };
  // The GPUs of this process. There is at least one, and all processes have the same number of
  // GPUs.
  std::vector<OfGpu> gpus;
  std::string cuda;  // the path of the CUDA driver's library; "" for the system's library
  std::string nccl;  // the path of NCCL's library; "" if NCCL is not used
  // Whether the ranks use TLS. If they do, NCCL is not used, because it does not encrypt data.
  bool tls = false;
  // The requested transport: "nccl", "host", or "p2p" for kernels and copies that access the memory
  // of other GPUs. If it is "by_size" or "", the core chooses the fastest available transport. It
  // then uses kernels instead of NCCL up to a certain size of the data. This size is fixed for
  // "by_size", and measured for "".
  std::string transport;
  // The size of each of a GPU's two staging buffers, in bytes.
  size_t buffer_bytes = size_t{8} << 20;
  // For tests: whether kernels and NCCL may be used even if ranks share a GPU.
  bool may_share_gpu = false;
  // For tests: whether streams instead of kernels wait for other ranks, even if each rank has a GPU
  // of its own.
  bool streams_wait = false;
  double timeout_seconds = 600;
  std::function<void(const std::string&)> warn;

  bool is_free() const { return transport.empty() || transport == "by_size"; }
};

// Throws Error(kInvalidArgument) if there is no usable driver, or if a setting is invalid.
void CheckDevice(const DeviceSetup& setup);

// The parts of an operation: one part for each GPU of this process, in the order of the GPUs.
using Parts = std::vector<Operation*>;

inline bool IsMessage(Kind kind) { return kind == Kind::kSend || kind == Kind::kReceive; }
inline bool IsReduction(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
}

// Returns the tensors of an operation, and the addresses of their results. If the buffers of the
// input and of the output have different sizes, a tensor is split wherever a buffer ends.
std::vector<KernelAllReduce::Tensor> TensorsOf(const Operation& part);

// Returns the address of a buffer list, which must consist of a single buffer. Returns 0 if the
// list is empty.
cuda::Address AddressOf(const ConstBufferList& buffers);
inline cuda::Address AddressOf(const BufferList& buffers) { return AddressOf(buffers.Const()); }

}  // namespace tfdist
