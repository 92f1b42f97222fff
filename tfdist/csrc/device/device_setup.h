// The GPUs of a communicator, and how they are set up.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/kernel_launch.h"

namespace tfdist {

// What a communicator is told of this process's GPUs.
struct DeviceSetup {
  struct OfGpu {
    int number = 0;       // among those that this process sees
    std::string kernels;  // the file of the compiled kernels; empty for none
  };
  std::vector<OfGpu> gpus;  // of this process, at least one; as many on all ranks
  std::string cuda;         // the driver's library; empty for the system's
  std::string nccl;         // NCCL's library; empty for none
  bool tls = false;         // between ranks, where NCCL would send in the clear
  // "own", "nccl" or "host"; "by_size" for whichever usually is the best, empty for what is, by
  // trying.
  std::string transport;
  size_t buffer_bytes = size_t{8} << 20;  // of each of two staging buffers on each GPU
  bool may_share_gpu = false;  // whether ranks of one GPU use kernels and NCCL; for tests
  bool streams_wait = false;   // in the place of kernels, whoever shares a GPU; for tests
  double timeout_seconds = 600;
  std::function<void(const std::string&)> warn;

  bool is_free() const { return transport.empty() || transport == "by_size"; }
};

// Throws Error(kInvalidArgument) where there is no driver, or a setting is none.
void CheckDevice(const DeviceSetup& setup);

// What the GPUs of a process bring to an operation, as kernels and NCCL take it.
//
// One for each GPU, in their order.
using Parts = std::vector<Operation*>;

inline bool IsMessage(Kind kind) { return kind == Kind::kSend || kind == Kind::kReceive; }
inline bool IsReduction(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
}

// The tensors of an operation, wherever a piece of either side ends.
std::vector<KernelAllReduce::Tensor> TensorsOf(const Operation& part);

// Where all of it lies, as one tensor; 0 for nothing.
cuda::Address AddressOf(const ConstPieces& pieces);
inline cuda::Address AddressOf(const Pieces& pieces) { return AddressOf(pieces.Const()); }

}  // namespace tfdist
