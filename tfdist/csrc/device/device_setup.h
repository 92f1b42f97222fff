// The GPUs of a communicator, and their settings.
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
    int number = 0;       // index among the GPUs visible to this process
    std::string kernels;  // path of the file with the compiled kernels; empty for none
  };
  std::vector<OfGpu> gpus;  // the GPUs of this process; at least one, and equally many on all ranks
  std::string cuda;         // path of the CUDA driver's library; empty for the system's library
  std::string nccl;         // path of NCCL's library; empty if NCCL is not used
  bool tls = false;         // whether the ranks use TLS; NCCL would send data unencrypted
  // The transport: "p2p", "nccl" or "host". If it is "by_size", the size of the message determines
  // the transport. If it is "", a measurement determines the transport.
  std::string transport;
  // The size of each of the two staging buffers of a GPU.
  size_t buffer_bytes = size_t{8} << 20;
  // For tests: whether ranks that share a GPU may use kernels and NCCL.
  bool may_share_gpu = false;
  // For tests: whether streams wait instead of kernels, even if no ranks share a GPU.
  bool streams_wait = false;
  double timeout_seconds = 600;
  std::function<void(const std::string&)> warn;

  bool is_free() const { return transport.empty() || transport == "by_size"; }
};

// Throws Error(kInvalidArgument) if there is no driver or a setting is invalid.
void CheckDevice(const DeviceSetup& setup);

// The parts of an operation: one for each GPU of this process, in the order of the GPUs.
using Parts = std::vector<Operation*>;

inline bool IsMessage(Kind kind) { return kind == Kind::kSend || kind == Kind::kReceive; }
inline bool IsReduction(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
}

// Returns the tensors of an operation. A tensor is split wherever a buffer of the input or of the
// output ends.
std::vector<KernelAllReduce::Tensor> TensorsOf(const Operation& part);

// Returns the address of a buffer list that consists of one tensor, or 0 if the list is empty.
cuda::Address AddressOf(const ConstBufferList& buffers);
inline cuda::Address AddressOf(const BufferList& buffers) { return AddressOf(buffers.Const()); }

}  // namespace tfdist
