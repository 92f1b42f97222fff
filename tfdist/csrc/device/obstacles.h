// Why the GPUs of a communicator cannot go a way; the same on all ranks.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "device/peers.h"
#include "transport/fabric.h"

namespace tfdist {

// All GPUs of a communicator.
struct DeviceTeam {
  Topology topology;                 // whose ranks are GPUs; `rank` is this process's first
  std::vector<Introduction> ranks;   // what each has told
  bool tls = false;
  bool may_share_gpu = false;
  bool streams_wait = false;         // whoever shares a GPU
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
