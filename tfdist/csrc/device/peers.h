// Opens the memory of other GPUs, and reports the reasons why kernels or NCCL cannot be used.
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

// The information about one GPU of a communicator, which the ranks exchange to connect their GPUs.
// It is copied as bytes between processes of the same program.
struct PeerInfo {
  cuda::Uuid gpu;
  char place[32];           // location of the GPU in its host
  cuda::Uuid process;       // name of the process; unique among all processes
  cuda::Uuid communicator;  // name that the process proposes for the communicator
  int32_t number;           // index among the GPUs visible to its process
  char model[64];
  char lack[384];           // why the GPU has no kernels; "" if it has kernels
  cuda::IpcHandle staging;  // only set if the GPU has kernels
  cuda::IpcHandle words;
  cuda::Address staging_address;
  cuda::Address words_address;
  uint64_t buffer_bytes;
  int32_t nccl;  // version of NCCL; 0 if there is none
  uint8_t has_stream_waits;
  uint8_t nccl_shares;  // whether NCCL can share a GPU and is configured to share it
  char transport[8];    // the requested transport
};

// Exchanges the information about all GPUs, and returns it in the order of the processes. All
// processes call this function and the following functions within the same operation. Throws
// Error(kMismatch) if the processes have different numbers of GPUs.
std::vector<PeerInfo> ExchangePeerInfo(Fabric& fabric, const Operation& operation,
                                       const std::vector<PeerInfo>& own);

// Exchanges one number for each GPU, and returns all numbers in the same order.
std::vector<size_t> TellAll(Fabric& fabric, const Operation& operation,
                            const std::vector<size_t>& own);

// Returns, for each number, the maximum over all processes.
std::vector<double> LargestOfAll(Fabric& fabric, const Operation& operation,
                                 const std::vector<double>& own);

// Returns whether `here` is true on all processes.
bool AllAgree(Fabric& fabric, const Operation& operation, bool here);

// Each process passes its obstacle, or "" if it has none. Returns the obstacle of the first process
// that has one, together with the name of this process, or "" if no process has an obstacle.
std::string FirstLack(Fabric& fabric, const Operation& operation, const std::string& own);

// Returns the value of the first process.
nccl::UniqueId IdOfRankZero(Fabric& fabric, const Operation& operation, const nccl::UniqueId& own);

bool AreSame(const cuda::Uuid& a, const cuda::Uuid& b);

// Returns a new name that is unique.
cuda::Uuid NewName();

// Returns the unique name of this process. It is the same for all ranks of the process.
cuda::Uuid ThisProcess();

// Gives the kernels of one GPU access to the memory of the other GPUs.
class Peers {
 public:
  // Opens the memory of the other ranks. Throws Error if the driver refuses.
  // Args: gpu: the GPU of this rank; ranks: the information about all ranks, with the handles of
  // their memory; rank: this rank's number.
  Peers(const Gpu& gpu, const std::vector<PeerInfo>& ranks, size_t rank);

  const std::vector<KernelAllReduce::Shared>& shared() const { return shared_; }

  // These functions check whether the GPU can access the memory of the other GPUs, since drivers
  // have bugs. `Write` writes to the staging buffers of all GPUs. After all GPUs have written,
  // `Read` reads these values back. Both functions return whether the check has passed.
  bool Write() const;
  bool Read() const;

 private:
  struct Opened {
    Opened(const Gpu& gpu, const PeerInfo& rank)
        : staging(gpu, rank.staging), words(gpu, rank.words) {}
    PeerMemory staging, words;
  };
  std::vector<std::unique_ptr<Opened>> opened_;
  const Gpu& gpu_;
  std::vector<KernelAllReduce::Shared> shared_;
  const size_t rank_;
};

// All GPUs of a communicator. The functions below return the same results on all ranks.
struct DeviceGroup {
  Topology topology;            // each GPU is a rank; `rank` is the first rank of this process
  std::vector<PeerInfo> ranks;  // one for each GPU
  bool tls = false;
  bool may_share_gpu = false;
  bool streams_wait = false;  // even if no ranks share a GPU
};

// Returns whether streams wait for the other ranks, instead of kernels.
bool StreamsWait(const DeviceGroup& group);

// Returns why kernels cannot access the memory of other GPUs, as far as all ranks know the reason.
// Returns "" if they can.
std::string WhyNoKernels(const DeviceGroup& group);

// Returns why NCCL cannot be used, or "" if it can.
std::string WhyNoNccl(const DeviceGroup& group);

// If there are GPUs of different models, returns the names of two of them, since their step times
// differ. Otherwise, returns "".
std::string HowGpusDiffer(const DeviceGroup& group);

// Returns the size of the smallest staging buffer. All ranks use this size to divide their buckets.
size_t MinBufferBytes(const DeviceGroup& group);

// Throws Error(kMismatch) if the settings of the ranks request different transports.
void CheckTransports(const DeviceGroup& group);

}  // namespace tfdist
