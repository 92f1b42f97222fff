// What the GPUs of a process bring to an operation, as kernels and NCCL take it.
#pragma once

#include <vector>

#include "collective/operation.h"
#include "device/kernel_all_reduce.h"

namespace tfdist {

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
