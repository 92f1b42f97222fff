// One GPU of a communicator, and the resources that the communicator has on this GPU.
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
  // Throws Error if the GPU cannot be used. If only the kernels cannot be used, `lack` contains the
  // reason.
  // Args: index: the index of the GPU in the setup.
  DeviceRank(const DeviceSetup& setup, size_t index);

  // Returns the information about this GPU for the other ranks. If the memory of the GPU cannot be
  // shared, the information says that this GPU has no kernels.
  PeerInfo MakePeerInfo(const DeviceSetup& setup);

  const int number;  // index among the GPUs visible to this process
  const std::shared_ptr<const Gpu> gpu;
  std::string lack;
  std::shared_ptr<const KernelModule> kernels;  // null if the GPU has no kernels
  std::optional<DeviceMemory> staging, words;
  DeviceStream stream;
  DeviceEvent done;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<StreamBarriers> stream_barriers;  // null unless streams wait instead of kernels
  std::unique_ptr<KernelAllReduce> own;
  std::unique_ptr<NcclGroup> nccl;       // created on first use
  std::unique_ptr<FusionBuffer> fusion;  // for small tensors; set on all ranks or on none

 private:
  void AllocateBuffers(size_t buffer_bytes);
};

}  // namespace tfdist
