// One GPU of a communicator, and the communicator's resources on it.
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
  // Args: index: the position among the setup's GPUs. Throws Error if the GPU cannot be used. If
  // only the kernels cannot be used, sets `lack` to the reason.
  DeviceRank(const DeviceSetup& setup, size_t index);

  // Returns the information for the other ranks; without kernels if the GPU's memory cannot be
  // shared.
  PeerInfo MakePeerInfo(const DeviceSetup& setup);

  const int number;  // among the GPUs visible to this process
  const std::shared_ptr<const Gpu> gpu;
  std::string lack;
  std::shared_ptr<const KernelModule> kernels;  // null if there are none
  std::optional<DeviceMemory> staging, words;
  DeviceStream stream;
  DeviceEvent done;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<StreamBarriers> stream_barriers;  // set if streams wait instead of kernels
  std::unique_ptr<KernelAllReduce> own;
  std::unique_ptr<NcclGroup> nccl;       // created on first use
  std::unique_ptr<FusionBuffer> fusion;  // for small tensors; set on all ranks or on none

 private:
  void AllocateBuffers(size_t buffer_bytes);
};

}  // namespace tfdist
