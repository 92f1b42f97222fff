// How a communicator runs collectives of what is on a GPU: the ranks arrive on the host, so that
// nothing waits on a GPU for a rank that never comes, then the data go one of three ways.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/device_coder.h"
#include "device/gpu.h"
#include "device/host_staged.h"
#include "device/kernel_all_reduce.h"
#include "device/nccl_group.h"
#include "device/peers.h"
#include "guard.h"
#include "transport/fabric.h"

namespace tfdist {

class DevicePath {
 public:
  struct Setup {
    int gpu = 0;            // its number among those that this process sees
    std::string kernels;    // the file of the compiled kernels; empty for none
    std::string cuda;       // the driver's library; empty for the system's
    std::string nccl;       // NCCL's library; empty for none
    std::string transport;  // "own", "nccl" or "host"; empty for whichever is best
    size_t buffer_bytes = size_t{8} << 20;  // of each of two staging buffers
    bool may_share_gpu = false;  // whether ranks of one GPU use kernels and NCCL; for tests
    double timeout_seconds = 600;
    std::function<void(const std::string&)> warn;
  };
  using OnHost = HostStaged::OnHost;

  // Args: what ends waits early. Talks to nobody; throws Error where a GPU cannot be used.
  DevicePath(Setup setup, Guard& guard);

  // Waits until a point in the program's stream has passed, or for what ends the wait; an error of the
  // GPU shows in what is run next.
  void AwaitInput(cuda::Event* ready, const std::function<bool()>& ends) const noexcept;

  // Runs an operation whose memory is the GPU's, and waits for its result. Args: how one is run
  // whose memory is the host's.
  void Run(Fabric& fabric, Operation& operation, const OnHost& on_host);

  // The GPU; may live longer than the path.
  const std::shared_ptr<const Gpu>& gpu() const { return gpu_; }

  // At the end, where nothing has failed: waits, but not for long, until the others have read what
  // they need of this rank's memory.
  void Leave();

 private:
  enum class Transport { kHost, kOwn, kNccl };

  void AllocateBuffers();
  void Open(Fabric& fabric, const Operation& operation);
  void OpenPeers(Fabric& fabric, const Operation& operation);
  void CheckTransport(const Fabric& fabric, const std::string& no_nccl) const;
  std::string CommonLack(const Fabric& fabric) const;
  std::string WhyNoNccl(const Fabric& fabric) const;
  bool HaveOwnGpus() const;
  bool MayUseNccl() const { return no_nccl_.empty(); }
  void Announce() const;
  void AnnounceNoNccl(const Fabric& fabric) const;
  Transport Choose(const Operation& operation) const;
  void AnnounceNoRoom(const std::string& why);
  bool RunCompressed(const Topology& topology, Operation& operation, const OnHost& on_host);
  void Launch(const std::vector<KernelAllReduce::Tensor>& tensors, const Fingerprint& asked,
              Transport transport);
  void GiveUp() noexcept;

  const Setup setup_;
  Guard& guard_;
  const std::shared_ptr<const Gpu> gpu_;
  std::optional<KernelModule> kernels_;
  std::optional<DeviceMemory> staging_, words_;
  DeviceStream stream_;
  DeviceEvent done_;
  HostStaged host_;
  std::string no_nccl_;  // why there is none, once the ranks are known
  std::string lack_;  // why there are no kernels here, or no way to the peers
  int rank_ = 0;
  nccl::UniqueId id_{};
  std::vector<Introduction> ranks_;  // empty before the first operation
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<KernelAllReduce> own_;
  std::unique_ptr<NcclGroup> nccl_;  // made when it is used first
  std::unique_ptr<DeviceCoder> coder_;  // the same
  bool announced_no_room_ = false;
};

}  // namespace tfdist
