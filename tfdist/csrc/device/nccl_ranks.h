// Runs collectives through NCCL, including compressed ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/device_rank.h"
#include "device/device_setup.h"
#include "device/launch_order.h"
#include "error.h"
#include "transport/fabric.h"

namespace tfdist {

// Compressed all-reduces among GPUs through NCCL: encoded values move between the GPUs' memories.
class NcclCoded {
 public:
  using Ranks = std::vector<std::unique_ptr<DeviceRank>>;

  // Args: topology: its ranks are GPUs; ranks: the ranks of this process.
  NcclCoded(const Topology& topology, const Ranks& ranks);
  ~NcclCoded();

  // Whether this class can run a compressed operation; the same answer on all ranks.
  bool Takes(const Parts& parts) const;
  // Whether earlier launches must end before there is room for an operation.
  bool IsFull(const Parts& parts) const;
  // Allocates room after earlier launches have ended; returns whether all ranks have room. Args:
  // lack: the reason for missing room on this rank.
  bool MakeRoom(Fabric& fabric, const Operation& operation, const Parts& parts, std::string* lack);

  // Queues an operation in the GPUs' streams, after `MakeRoom`; returns at once.
  void Launch(const Parts& parts);

 private:
  struct Lane;
  class Share;

  void Allocate(size_t bytes);
  const Topology& Groups(size_t gpu, const Operation& part) const;

  const Ranks& ranks_;
  // All ranks as each of these GPUs sees them, grouped by host, and grouped by process.
  std::vector<Topology> hosts_, processes_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // one for each GPU, once there is room
  size_t agreed_ = 0;                         // all ranks have room for this many encoded bytes,
  size_t refused_ = SIZE_MAX;                 // and some rank lacks room for this many
};

// The GPUs of a process as NCCL ranks, launched together by one thread.
class NcclRanks {
 public:
  struct Setup {
    nccl::UniqueId id;
    size_t first;         // of this process's ranks
    int size;             // of all processes
    size_t buffer_bytes;  // for packed small tensors; the same on all ranks
    double timeout_seconds;
    bool fuses;                                    // whether all-reduces will follow
    std::function<void(const std::string&)> warn;  // may be empty
  };

  // Joins the other processes. All processes call this within one operation. Args: this process's
  // GPUs, with `nccl` and `fusion` set; a guard that may end waits.
  NcclRanks(Fabric& fabric, const Operation& operation,
            std::vector<std::unique_ptr<DeviceRank>>& ranks, const Setup& setup, Guard& guard);

  // Queues a collective or a message in the GPUs' streams; returns at once.
  void Launch(const Fingerprint& asked, const Parts& parts);

 private:
  void MakeFusion(Fabric& fabric, const Operation& operation, const Setup& setup);
  void LaunchFused(const Fingerprint& asked, const Parts& parts);
  void Call(const Fingerprint& asked, const Operation& part, DeviceRank& rank) const;
  void Gather(const Operation& part, DeviceRank& rank) const;
  std::vector<NcclGroup*> Groups() const;

  std::vector<std::unique_ptr<DeviceRank>>& ranks_;
  const size_t buffer_bytes_;
  Siblings siblings_;
};

}  // namespace tfdist
