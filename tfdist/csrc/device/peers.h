// Opens the memory of other GPUs, and finds out why kernels or NCCL cannot be used.
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

// The information about one GPU of a communicator. The ranks exchange this information in order to
// connect their GPUs. It is sent as the bytes of this struct, because all processes run the same
// version of the core.
struct PeerInfo {
  cuda::Uuid gpu;
  char place[32];           // the PCI bus ID of the GPU
  cuda::Uuid process;       // the name of the process, which is unique among all processes
  cuda::Uuid communicator;  // a new unique name; the communicator gets the name that rank 0 sends
  int32_t number;           // the index of the GPU among the GPUs visible to its process
  char model[64];
  char lack[384];  // the reason why the GPU cannot use kernels; "" if it can
  // The staging buffers and the words of the GPU, as handles and as addresses. They are set only if
  // the GPU can use kernels.
  cuda::IpcHandle staging;
  cuda::IpcHandle words;
  cuda::Address staging_address;
  cuda::Address words_address;
  uint64_t buffer_bytes;
  int32_t nccl;  // the version of NCCL; 0 if NCCL is not used
  uint8_t has_stream_waits;
  uint8_t nccl_shares;  // whether several ranks may share a GPU in NCCL
  char transport[8];    // the requested transport
};

// Sends the information about the GPUs of this process to all processes. Returns the information
// about all GPUs, in the order of the processes. All processes must call this function, and the
// following functions, during the same operation. Throws Error(kMismatch) if the processes have
// different numbers of GPUs.
std::vector<PeerInfo> ExchangePeerInfo(Fabric& fabric, const Operation& operation,
                                       const std::vector<PeerInfo>& own);

// Sends the numbers in `own`, one for each GPU of this process, to all processes. Returns the
// numbers of all GPUs, in the order of the ranks.
std::vector<size_t> TellAll(Fabric& fabric, const Operation& operation,
                            const std::vector<size_t>& own);

// Returns, for each number in `own`, its maximum over all processes.
std::vector<double> LargestOfAll(Fabric& fabric, const Operation& operation,
                                 const std::vector<double>& own);

// Returns whether all processes have called this function with `here` set to true.
bool AllAgree(Fabric& fabric, const Operation& operation, bool here);

// Collects reasons why something cannot be done. Each process passes its reason in `own`, or "" if
// it has none. Returns the reason of the first process that has one, preceded by the name of this
// process. Returns "" if no process has a reason.
std::string FirstLack(Fabric& fabric, const Operation& operation, const std::string& own);

// Returns the identifier that the first process has passed in `own`.
nccl::UniqueId IdOfRankZero(Fabric& fabric, const Operation& operation, const nccl::UniqueId& own);

bool AreSame(const cuda::Uuid& a, const cuda::Uuid& b);

// Returns a new name, which is unique among all names of all processes.
cuda::Uuid NewName();

// Returns the name of this process, which is unique among all processes. All GPUs of this process
// have the same process name.
cuda::Uuid ThisProcess();

// Gives the kernels of one GPU access to the memory of the other GPUs.
class Peers {
 public:
  // Opens the memory of the other ranks. Throws Error if the driver does not allow it.
  // Args: gpu: the GPU of this rank; ranks: the information about all ranks, which contains the
  // handles of their memory; rank: the index of this rank in `ranks`.
  Peers(const Gpu& gpu, const std::vector<PeerInfo>& ranks, size_t rank);

  const std::vector<KernelAllReduce::Shared>& shared() const { return shared_; }

  // These functions test the access to the memory of the other GPUs. The test is necessary because
  // some drivers have bugs: they open the memory of another GPU without an error, but the GPU then
  // reads wrong data from it. `Write` writes test values to the staging buffers of all GPUs. When
  // all ranks have called `Write`, `Read` reads the test values and compares them. Both functions
  // return false if the test has failed.
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

// All GPUs of a communicator. The functions below return the same results on all ranks, because all
// ranks have exchanged this information.
struct DeviceGroup {
  // The topology in which each GPU is a rank. Its member `rank` is the first rank of this process.
  Topology topology;
  std::vector<PeerInfo> ranks;  // the information about each GPU
  bool tls = false;
  bool may_share_gpu = false;
  bool streams_wait = false;  // whether streams wait even if each rank has a GPU of its own
};

// Returns whether streams, instead of kernels, wait for other ranks.
bool StreamsWait(const DeviceGroup& group);

// Returns why kernels cannot access the memory of other GPUs, or "" if no reason is known. This
// function only knows the reasons that follow from the exchanged information. It does not try to
// open the memory.
std::string WhyNoKernels(const DeviceGroup& group);

// Returns why NCCL cannot be used, or "" if it can.
std::string WhyNoNccl(const DeviceGroup& group);

// Returns the names of two different models of GPUs, or "" if all GPUs are of the same model.
// Different models matter because they need different times for the same step, so the faster GPUs
// wait for the slower ones.
std::string HowGpusDiffer(const DeviceGroup& group);

// Returns the size of the smallest staging buffer of all ranks. All ranks divide their buckets by
// this size, so that they divide them in the same way.
size_t MinBufferBytes(const DeviceGroup& group);

// Throws Error(kMismatch) if the settings of the ranks do not all request the same transport.
void CheckTransports(const DeviceGroup& group);

}  // namespace tfdist
