// How many threads and blocks share a kernel's work.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tfdist {

constexpr unsigned kKernelThreads = 512;
// Of kernels that wait for nobody: from 256 blocks on, an H100 moves memory about as fast as it copies.
constexpr uint64_t kMostBlocksAlone = 512;

// The same on all ranks, whatever GPU they have.
inline unsigned BlocksFor(uint64_t vectors, uint64_t most) {
  const uint64_t wanted = (vectors + kKernelThreads - 1) / kKernelThreads;
  return static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, most));
}

}  // namespace tfdist
