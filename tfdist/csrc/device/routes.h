// Chooses among the transports that are available between the GPUs of a communicator. The ranks
// exchange information about their GPUs, so that all ranks make the same choice.
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

  // Args: ranks: the GPUs of this process. `Open` sets their members `peers`, `stream_barriers` and
  // `own`.
  Routes(const DeviceSetup& setup, Ranks& ranks) : setup_(setup), ranks_(ranks) {}

  // Exchanges information about the GPUs among all ranks, and connects the GPUs. Does nothing if
  // this has already been done. All processes must call this function during the same operation.
  // Throws Error if the settings request NCCL, but NCCL is unavailable.
  void Open(Fabric& fabric, const Operation& operation);

  // The following functions may be called only after `Open`.
  //
  // Returns the topology in which each GPU is a rank.
  const Topology& topology() const { return group_.topology; }
  // Returns the first rank of this process.
  size_t first() const { return static_cast<size_t>(group_.topology.rank); }
  const nccl::UniqueId& id() const { return id_; }
  // Returns the name of this communicator, which is unique among all communicators of all
  // processes.
  const cuda::Uuid& name() const { return group_.ranks[0].communicator; }
  // Returns the size of the smallest staging buffer of all ranks. All ranks divide their buckets by
  // this size, so that they divide them in the same way.
  size_t min_buffer_bytes() const { return MinBufferBytes(group_); }
  // Returns whether a measurement must decide between kernels and NCCL. This is the case if both
  // are available and the settings request no transport.
  bool HaveChoice() const;
  void PreferKernelsUpTo(size_t bytes) { max_kernel_bytes_ = bytes; }
  // Returns the transport for an operation. Throws Error if the settings request kernels, but
  // kernels are unavailable.
  Transport Choose(const Fingerprint& asked, const Parts& parts) const;
  // Returns the transport for a compressed operation, which is NCCL or the host. The all-reduce
  // kernels do not support compression.
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
  DeviceGroup group_;    // its list of ranks is empty until `Open` is called
  std::string no_nccl_;  // why NCCL cannot be used; "" if it can
  std::string lack_;     // why kernels cannot access other GPUs; "" if they can
  nccl::UniqueId id_{};
  // The size in bytes up to which kernels are used instead of NCCL if both are available. The
  // default is a published value for GPUs that are connected by NVLink.
  size_t max_kernel_bytes_ = size_t{256} << 10;
};

}  // namespace tfdist
