// Opens the memory of other GPUs, and reports obstacles.
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

// The connection information of one GPU of a communicator; copied as bytes between processes of one
// program.
struct PeerInfo {
  cuda::Uuid gpu;
  char place[32];           // the GPU's location in its host
  cuda::Uuid process;       // unique among all processes
  cuda::Uuid communicator;  // the process's name for this communicator
  int32_t number;           // among the GPUs visible to its process
  char model[64];
  char lack[384];           // why it has no kernels; "" if it has
  cuda::IpcHandle staging;  // set if it has kernels
  cuda::IpcHandle words;
  cuda::Address staging_address;
  cuda::Address words_address;
  uint64_t buffer_bytes;
  int32_t nccl;  // its version; 0 for none
  uint8_t has_stream_waits;
  uint8_t nccl_shares;  // whether NCCL is able and configured to let ranks share a GPU
  char transport[8];    // the requested transport
};

// Exchanges the information of all GPUs, in the order of the processes. All processes call this and
// the following functions within one operation. Throws Error(kMismatch) if the processes have
// different numbers of GPUs.
std::vector<PeerInfo> ExchangePeerInfo(Fabric& fabric, const Operation& operation,
                                       const std::vector<PeerInfo>& own);

// Exchanges a number per GPU, in the same order.
std::vector<size_t> TellAll(Fabric& fabric, const Operation& operation,
                            const std::vector<size_t>& own);

// Returns, for each number, its maximum over all processes.
std::vector<double> LargestOfAll(Fabric& fabric, const Operation& operation,
                                 const std::vector<double>& own);

// Whether all processes succeeded.
bool AllAgree(Fabric& fabric, const Operation& operation, bool here);

// Returns the obstacle of the first process that has one, with its name; "" if none has. Args: this
// process's obstacle.
std::string FirstLack(Fabric& fabric, const Operation& operation, const std::string& own);

// Returns the first process's value.
nccl::UniqueId IdOfRankZero(Fabric& fabric, const Operation& operation, const nccl::UniqueId& own);

bool AreSame(const cuda::Uuid& a, const cuda::Uuid& b);

// Returns a unique name.
cuda::Uuid NewName();

// This process's own name, the same for all its ranks.
cuda::Uuid ThisProcess();

// The memory of other GPUs, as used by one GPU's kernels.
class Peers {
 public:
  // Opens the memory. Args: this rank's GPU, the handles of all ranks, and this rank's number.
  // Throws Error if the driver refuses.
  Peers(const Gpu& gpu, const std::vector<PeerInfo>& ranks, size_t rank);

  const std::vector<KernelAllReduce::Shared>& shared() const { return shared_; }

  // Check peer access, since drivers have bugs. `Write` writes to all GPUs' staging buffers. `Read`
  // reads them back; it is called once all GPUs have written. Both return whether the check passed.
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

// All GPUs of a communicator. The functions below return the same answer on all ranks.
struct DeviceGroup {
  Topology topology;            // its ranks are GPUs; `rank` is this process's first
  std::vector<PeerInfo> ranks;  // one per GPU
  bool tls = false;
  bool may_share_gpu = false;
  bool streams_wait = false;  // regardless of shared GPUs
};

// Whether streams, rather than kernels, wait for the other ranks.
bool StreamsWait(const DeviceGroup& group);

// Returns why kernels cannot access other GPUs' memory, as far as all ranks know; "" if they can.
std::string WhyNoKernels(const DeviceGroup& group);

// Returns why NCCL cannot be used; "" if it can.
std::string WhyNoNccl(const DeviceGroup& group);

// Names two GPUs of different models, since their step times differ; "" if there are none.
std::string HowGpusDiffer(const DeviceGroup& group);

// The size of the smallest buffer; all ranks divide their buckets by this size.
size_t MinBufferBytes(const DeviceGroup& group);

// Throws Error(kMismatch) if the ranks' settings request different transports.
void CheckTransports(const DeviceGroup& group);

}  // namespace tfdist
