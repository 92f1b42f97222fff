// The memory of other GPUs: how it is opened, and why it cannot be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "device/nccl.h"
#include "transport/fabric.h"

namespace tfdist {

// What the ranks of a communicator tell each other about their GPUs, and reach of each other's
// memory.
//
// Of one GPU, as it is: copied between processes of one program.
struct Introduction {
  cuda::Uuid gpu;
  char place[32];           // of the GPU in its host
  cuda::Uuid process;       // its own among all processes
  cuda::Uuid communicator;  // its process's name for this one
  int32_t number;           // among those that its process sees
  char model[64];
  char lack[384];           // why it has no kernels; "" if it has
  cuda::IpcHandle staging;  // where it has kernels
  cuda::IpcHandle words;
  cuda::Address staging_address;
  cuda::Address words_address;
  uint64_t buffer_bytes;
  int32_t nccl;  // its version; 0 for none
  uint8_t has_stream_waits;
  uint8_t nccl_shares;  // whether NCCL is told to let ranks share a GPU, and can
  char transport[8];    // that is asked for
};

// The introductions of all GPUs: those of each process after those of the one before. Called by all
// processes within one operation, as what follows is. Throws Error(kMismatch) where processes have
// different numbers of GPUs.
std::vector<Introduction> Introduce(Fabric& fabric, const Operation& operation,
                                    const std::vector<Introduction>& own);

// A number of each GPU, in the same order.
std::vector<size_t> TellAll(Fabric& fabric, const Operation& operation,
                            const std::vector<size_t>& own);

// Some numbers, each the largest of all processes.
std::vector<double> LargestOfAll(Fabric& fabric, const Operation& operation,
                                 const std::vector<double>& own);

// Whether all is well on each process.
bool AllAgree(Fabric& fabric, const Operation& operation, bool here);

// What the first process that cannot do something says about that, with its name; "" if all can.
// Args: what this one says.
std::string FirstLack(Fabric& fabric, const Operation& operation, const std::string& own);

// That of the first process.
nccl::UniqueId IdOfRankZero(Fabric& fabric, const Operation& operation, const nccl::UniqueId& own);

bool AreSame(const cuda::Uuid& a, const cuda::Uuid& b);

// A name that nothing else has.
cuda::Uuid NewName();

// This process's own name, the same for all its ranks.
cuda::Uuid ThisProcess();

// The memory of other GPUs, for the kernels of one.
class Peers {
 public:
  // Opens it. Args: the one GPU, which is this of all ranks. Throws Error where the driver does not
  // allow that.
  Peers(const Gpu& gpu, const std::vector<Introduction>& ranks, size_t rank);

  const std::vector<KernelAllReduce::Shared>& shared() const { return shared_; }

  // Writes to the others' staging buffers and, once all GPUs have, reads what they have written,
  // since drivers err. Both return whether all was as it should be.
  bool Write() const;
  bool Read() const;

 private:
  struct Opened {
    Opened(const Gpu& gpu, const Introduction& rank)
        : staging(gpu, rank.staging), words(gpu, rank.words) {}
    PeerMemory staging, words;
  };
  std::vector<std::unique_ptr<Opened>> opened_;
  const Gpu& gpu_;
  std::vector<KernelAllReduce::Shared> shared_;
  const size_t rank_;
};

// Why the GPUs of a communicator cannot go a way; the same on all ranks.
//
// All GPUs of a communicator.
struct DeviceTeam {
  Topology topology;                // whose ranks are GPUs; `rank` is this process's first
  std::vector<Introduction> ranks;  // what each has told
  bool tls = false;
  bool may_share_gpu = false;
  bool streams_wait = false;  // whoever shares a GPU
};

// Whether streams wait for the other ranks, not kernels.
bool StreamsWait(const DeviceTeam& team);

// Why no kernel can reach another GPU's memory, as far as all of them know; "" if it may.
std::string WhyNoKernels(const DeviceTeam& team);

// Why NCCL is not used; "" if it can be.
std::string WhyNoNccl(const DeviceTeam& team);

// Two GPUs of different models, which take different times for a step; "" if there are none.
std::string HowGpusDiffer(const DeviceTeam& team);

// The bytes of the smallest buffer of all: what all cut their buckets by.
size_t LeastBuffer(const DeviceTeam& team);

// Throws Error(kMismatch) where the ranks were told to go different ways.
void CheckTransports(const DeviceTeam& team);

}  // namespace tfdist
