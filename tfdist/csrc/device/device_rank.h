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
  // Throws Error if the GPU cannot be used. If the GPU can be used but the kernels cannot, the
  // constructor sets `lack` to the reason.
  // Args: index: the index of the GPU in `setup.gpus`.
  DeviceRank(const DeviceSetup& setup, size_t index);

  // Returns the information about this GPU that is sent to the other ranks. If the memory of the
  // GPU cannot be shared with other processes, sets `lack` to the reason, and the information
  // states that this GPU has no kernels.
  PeerInfo MakePeerInfo(const DeviceSetup& setup);

  const int number;  // the index of the GPU among the GPUs visible to this process
  const std::shared_ptr<const Gpu> gpu;
  // The reason why this GPU cannot use the kernels; "" if it can use them.
  std::string lack;
  std::shared_ptr<const KernelModule> kernels;  // null if the GPU has no kernels
  std::optional<DeviceMemory> staging, words;
  DeviceStream stream;
  DeviceEvent done;
  std::unique_ptr<Peers> peers;
  // The barriers with which streams wait for other ranks. Null if kernels wait instead.
  std::unique_ptr<StreamBarriers> stream_barriers;
  // Runs all-reduces with tfdist's own kernels. Null if the kernels cannot be used.
  std::unique_ptr<KernelAllReduce> own;
  std::unique_ptr<NcclGroup> nccl;  // created on first use
  // The buffer in which small tensors are packed together. Null on all ranks, or on none.
  std::unique_ptr<FusionBuffer> fusion;

 private:
  void AllocateBuffers(size_t buffer_bytes);
};

}  // namespace tfdist
