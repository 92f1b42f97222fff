// Chooses among the transports that are available between a communicator's GPUs. All ranks exchange
// information about their GPUs, so that they make the same choice.
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

  // Args: ranks: the GPUs of this process. `Open` sets their `peers` and `own`.
  Routes(const DeviceSetup& setup, Ranks& ranks) : setup_(setup), ranks_(ranks) {}

  // Exchanges the information about all ranks, unless this has already been done. All processes
  // call this function within the same operation. Throws Error if a requested transport is
  // unavailable.
  void Open(Fabric& fabric, const Operation& operation);

  // The following functions require that `Open` has been called.
  const Topology& topology() const { return group_.topology; }  // each GPU is a rank
  size_t first() const {
    return static_cast<size_t>(group_.topology.rank);
  }  // this process's first rank
  const nccl::UniqueId& id() const { return id_; }
  // Returns a name that is unique among all communicators of all processes.
  const cuda::Uuid& name() const { return group_.ranks[0].communicator; }
  // Returns the size of the smallest staging buffer of all ranks. All ranks use this size to divide
  // their buckets.
  size_t min_buffer_bytes() const { return MinBufferBytes(group_); }
  // Returns whether both kernels and NCCL are available, and a measurement must decide between
  // them.
  bool HaveChoice() const;
  void PreferKernelsUpTo(size_t bytes) { max_kernel_bytes_ = bytes; }
  // Returns the transport for an operation. Throws Error if the settings request kernels, but
  // kernels are unavailable.
  Transport Choose(const Fingerprint& asked, const Parts& parts) const;
  // Returns the transport for a compressed operation: NCCL or the host. Kernels do not support
  // compressed operations.
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
  std::string no_nccl_;  // why NCCL cannot be used; "" if it can
  std::string lack_;     // why kernels are not used; "" if they are used
  nccl::UniqueId id_{};
  // Up to this size in bytes, kernels are preferred to NCCL. The default is a published value for
  // GPUs that are connected by NVLink.
  size_t max_kernel_bytes_ = size_t{256} << 10;
};

}  // namespace tfdist
