// The transports available between a communicator's GPUs. All ranks exchange their information, so
// that they choose identically.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/device_rank.h"
#include "device/device_setup.h"
#include "device/peers.h"
#include "transport/fabric.h"

namespace tfdist {

class Routes {
 public:
  enum class Transport { kHost, kP2p, kNccl };
  using Ranks = std::vector<std::unique_ptr<DeviceRank>>;

  // Args: ranks: this process's GPUs; `Open` sets their `peers` and `own`.
  Routes(const DeviceSetup& setup, Ranks& ranks) : setup_(setup), ranks_(ranks) {}

  // Exchanges the ranks' information, if not yet done. All processes call this within one
  // operation. Throws Error if a requested transport is unavailable.
  void Open(Fabric& fabric, const Operation& operation);

  // The following require `Open`.
  const Topology& topology() const { return group_.topology; }  // its ranks are GPUs
  size_t first() const {
    return static_cast<size_t>(group_.topology.rank);
  }  // this process's first rank
  const nccl::UniqueId& id() const { return id_; }
  // Unique among all communicators of all processes.
  const cuda::Uuid& name() const { return group_.ranks[0].communicator; }
  // The size of the smallest buffer among all ranks, by which each rank divides its buckets.
  size_t min_buffer_bytes() const { return MinBufferBytes(group_); }
  // Whether both kernels and NCCL are available, and a measurement decides between them.
  bool HaveChoice() const;
  void PreferKernelsUpTo(size_t bytes) { max_kernel_bytes_ = bytes; }
  // Throws Error if kernels were requested and are unavailable.
  Transport Choose(const Fingerprint& asked, const Parts& parts) const;
  // The same for compressed operations: NCCL or the host's links, since kernels do not support
  // them.
  Transport ChooseForCompressed() const;

 private:
  void ExchangeInfo(Fabric& fabric, const Operation& operation);
  void OpenPeers(Fabric& fabric, const Operation& operation);
  void OpenStreamBarriers(Fabric& fabric, DeviceRank& rank, size_t number) const;
  bool MayUseNccl() const { return no_nccl_.empty(); }
  void Announce() const;
  void AnnounceNoNccl() const;
  void AnnounceUnlikeGpus() const;

  const DeviceSetup& setup_;
  Ranks& ranks_;
  DeviceGroup group_;    // has no ranks before the first operation
  std::string no_nccl_;  // why NCCL is unavailable; "" if it is available
  std::string lack_;     // why kernels are not used; "" if they are
  nccl::UniqueId id_{};
  // Up to this many bytes, kernels take precedence over NCCL. The default is a published value for
  // GPUs connected by NVLink.
  size_t max_kernel_bytes_ = size_t{256} << 10;
};

}  // namespace tfdist
