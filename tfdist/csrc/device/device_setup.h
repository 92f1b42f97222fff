// The GPUs of a communicator, and how they are set up.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/kernel_launch.h"

namespace tfdist {

// A communicator's settings for this process's GPUs.
struct DeviceSetup {
  struct OfGpu {
    int number = 0;       // among the GPUs visible to this process
    std::string kernels;  // the file of the compiled kernels; empty for none
  };
  std::vector<OfGpu> gpus;  // of this process, at least one; the same number on all ranks
  std::string cuda;         // the driver's library; empty for the system's
  std::string nccl;         // NCCL's library; empty for none
  bool tls = false;         // between ranks; NCCL would send unencrypted
  // "p2p", "nccl" or "host"; "by_size" picks by message size; "" measures and picks.
  std::string transport;
  size_t buffer_bytes = size_t{8} << 20;  // of each of two staging buffers on each GPU
  bool may_share_gpu = false;  // whether ranks of one GPU use kernels and NCCL; for tests
  bool streams_wait = false;   // instead of kernels, regardless of shared GPUs; for tests
  double timeout_seconds = 600;
  std::function<void(const std::string&)> warn;

  bool is_free() const { return transport.empty() || transport == "by_size"; }
};

// Throws Error(kInvalidArgument) if there is no driver or a setting is invalid.
void CheckDevice(const DeviceSetup& setup);

// The parts of an operation, one for each GPU of this process, in order.
using Parts = std::vector<Operation*>;

inline bool IsMessage(Kind kind) { return kind == Kind::kSend || kind == Kind::kReceive; }
inline bool IsReduction(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
}

// The tensors of an operation, split at each buffer boundary of the input and the output.
std::vector<KernelAllReduce::Tensor> TensorsOf(const Operation& part);

// The address of a buffer list that consists of one tensor; 0 if empty.
cuda::Address AddressOf(const ConstBufferList& buffers);
inline cuda::Address AddressOf(const BufferList& buffers) { return AddressOf(buffers.Const()); }

}  // namespace tfdist
