// One GPU of a communicator, and what the communicator has on it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/device_setup.h"
#include "device/fusion.h"
#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "device/nccl_group.h"
#include "device/peers.h"
#include "device/stream_waits.h"

namespace tfdist {

struct DeviceRank {
  // Args: which of the setup's GPUs. Throws Error where it cannot be used; where its kernels
  // cannot, `lack` says why.
  DeviceRank(const DeviceSetup& setup, size_t index);

  // What the other ranks need to know of it; without kernels if its memory cannot be shared.
  Introduction Introduce(const DeviceSetup& setup);

  const int number;  // among those that this process sees
  const std::shared_ptr<const Gpu> gpu;
  std::string lack;
  std::shared_ptr<const KernelModule> kernels;  // null for none
  std::optional<DeviceMemory> staging, words;
  DeviceStream stream;
  DeviceEvent done;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<StreamMeetings> meetings;  // where streams wait, not kernels
  std::unique_ptr<KernelAllReduce> own;
  std::unique_ptr<NcclGroup> nccl;       // made when it is used first
  std::unique_ptr<FusionBuffer> fusion;  // for small tensors, if all ranks have one

 private:
  void AllocateBuffers(size_t buffer_bytes);
};

}  // namespace tfdist
