// Sums the rows of all ranks into tensors by kernels, to the bits of the processor. All memory is on the
// GPU.
#pragma once

#include <cstddef>
#include <vector>

#include "device/gpu.h"
#include "device/kernels/scattering.h"
#include "sparse/row.h"
#include "sparse/rows.h"

namespace tfdist {

// The names of its kernels.
std::vector<const char*> ScatterKernelNames();

class KernelScatter {
 public:
  // Args: ranks: whose rows there are, one rank's behind the other's.
  KernelScatter(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream, size_t ranks)
      : gpu_(gpu), kernels_(kernels), stream_(stream), ranks_(ranks) {}

  // What it needs until the stream has passed its work.
  size_t ScratchBytes() const;
  // Has the stream sum as `SumRows` does, and returns at once. Rows that ranks do not send, such as of
  // an index of no value, make all sums NaN.
  void Sum(const Row* rows, size_t count, const std::vector<RowSums>& tensors,
           cuda::Address scratch) const;

 private:
  const Gpu& gpu_;
  const KernelModule& kernels_;
  cuda::Stream* const stream_;
  const size_t ranks_;
};

}  // namespace tfdist
