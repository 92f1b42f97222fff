// Which ways the GPUs of a communicator have to each other, as all ranks find out together, so that
// all choose alike.
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

  // Args: this process's GPUs, whose `peers` and `own` are made.
  Routes(const DeviceSetup& setup, Ranks& ranks) : setup_(setup), ranks_(ranks) {}

  // Has the ranks introduce themselves, unless they have. All processes call this within one
  // operation. Throws Error where the way that was asked for cannot be had.
  void Open(Fabric& fabric, const Operation& operation);

  // Once open:
  const Topology& topology() const { return team_.topology; }                // whose ranks are GPUs
  size_t first() const { return static_cast<size_t>(team_.topology.rank); }  // of this process's
  const nccl::UniqueId& id() const { return id_; }
  // Of this communicator among all of all processes.
  const cuda::Uuid& name() const { return team_.ranks[0].communicator; }
  // What all cut their buckets by.
  size_t least_buffer() const { return LeastBuffer(team_); }
  // Whether kernels and NCCL are there, and which is faster is to be found out.
  bool HaveChoice() const;
  void PreferKernelsUpTo(size_t bytes) { most_before_nccl_ = bytes; }
  // Throws Error where own kernels were asked for and there are none.
  Transport Choose(const Fingerprint& asked, const Parts& parts) const;
  // The same for what is compressed: NCCL or the host's links, since kernels have no way for it.
  Transport ChooseForCompressed() const;

 private:
  void Introduce(Fabric& fabric, const Operation& operation);
  void OpenPeers(Fabric& fabric, const Operation& operation);
  void OpenMeetings(Fabric& fabric, DeviceRank& rank, size_t number) const;
  bool MayUseNccl() const { return no_nccl_.empty(); }
  void Announce() const;
  void AnnounceNoNccl() const;
  void AnnounceUnlikeGpus() const;

  const DeviceSetup& setup_;
  Ranks& ranks_;
  DeviceTeam team_;      // without ranks before the first operation
  std::string no_nccl_;  // why there is none
  std::string lack_;     // why no kernels are used
  nccl::UniqueId id_{};
  // Up to so many bytes kernels come before NCCL: what others have measured between GPUs that
  // NVLink connects.
  size_t most_before_nccl_ = size_t{256} << 10;
};

}  // namespace tfdist
