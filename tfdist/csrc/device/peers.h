// What the ranks of a communicator tell each other about their GPUs, and reach of each other's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/gpu.h"
#include "device/kernel_all_reduce.h"
#include "device/nccl.h"
#include "transport/fabric.h"

namespace tfdist {

// Of one rank, as it is: copied between processes of one program.
struct Introduction {
  cuda::Uuid gpu;
  char place[32];            // of the GPU in its host
  cuda::Uuid process;        // its own among all processes
  cuda::IpcHandle staging;   // where `has_kernels`
  cuda::IpcHandle words;
  cuda::Address staging_address;
  cuda::Address words_address;
  uint64_t buffer_bytes;
  int32_t nccl;              // its version; 0 for none
  uint8_t has_kernels;
  char transport[8];         // that is asked for
};

// The introductions of all ranks. Called by all of them within one operation.
std::vector<Introduction> Introduce(Fabric& fabric, const Operation& operation,
                                    const Introduction& own);

// Whether all is well on each rank, in the same way.
bool AllAgree(Fabric& fabric, const Operation& operation, bool here);

// Rank 0's.
nccl::UniqueId IdOfRankZero(Fabric& fabric, const Operation& operation, const nccl::UniqueId& own);

bool AreSame(const cuda::Uuid& a, const cuda::Uuid& b);

// This process's own name, the same for all its ranks.
cuda::Uuid ThisProcess();

// The other ranks' memory, for kernels.
class Peers {
 public:
  // Opens it. Throws Error where the driver does not allow that.
  Peers(const Gpu& gpu, const std::vector<Introduction>& ranks, int rank);

  const std::vector<KernelAllReduce::Shared>& shared() const { return shared_; }

  // Writes to the others' staging buffers and reads from them, since drivers err: all ranks call
  // this together. Returns whether this rank could, and has found what was written.
  bool Probe(Fabric& fabric, const Operation& operation, const Gpu& gpu);

 private:
  struct Opened {
    Opened(const Gpu& gpu, const Introduction& rank)
        : staging(gpu, rank.staging), words(gpu, rank.words) {}
    PeerMemory staging, words;
  };
  std::vector<std::unique_ptr<Opened>> opened_;
  std::vector<KernelAllReduce::Shared> shared_;
  const size_t rank_;
};

}  // namespace tfdist
