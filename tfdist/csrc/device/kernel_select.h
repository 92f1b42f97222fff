// Selects the values of a sparse gradient by kernels, to the bits of the processor. All memory is on the
// GPU.
#pragma once

#include <cstddef>
#include <vector>

#include "device/gpu.h"
#include "device/kernels/selecting.h"
#include "sparse/row.h"
#include "sparse/select.h"

namespace tfdist {

// The names of its kernels.
std::vector<const char*> SelectKernelNames();

class KernelSelect {
 public:
  // Args: all: each tensor's; fewer than `kMostCandidates` all together.
  KernelSelect(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream,
               const std::vector<Candidates>& all);

  // What it needs from the first call until the stream has passed the last one's work.
  size_t ScratchBytes() const;

  // Has the stream bring what is kept up to date and find what to select, as `SelectLargest` and
  // `SelectAbove` do, and returns at once.
  // Args: selected: how many of each tensor.
  void FindLargest(const std::vector<size_t>& selected, cuda::Address scratch);
  void FindAbove(float threshold, cuda::Address scratch);
  // Where the number of rows is then, a uint32.
  cuda::Address rows() const { return cuda::AddressOf(cuts_.all_rows); }
  // Has the stream take what was found, as `TakeRows` does.
  void Take(Row* rows);

 private:
  void Begin(uint32_t magnitude, cuda::Address scratch);
  void Fill(const void* from, uint32_t value, size_t words) const;
  void Count(bool accumulates);
  template <typename... Arguments>
  void Launch(const char* name, uint64_t teams, Arguments... arguments) const;

  const Gpu& gpu_;
  const KernelModule& kernels_;
  cuda::Stream* const stream_;
  std::vector<device::Sources> lists_;
  uint32_t tensors_ = 0;
  size_t tiles_ = 0;
  bool keeps_ = false;  // what is not sent
  device::Cuts cuts_{};
};

}  // namespace tfdist
