// Collectives by NCCL, also of encoded values.
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

// Compressed all-reduces among GPUs by NCCL: what is encoded goes from one GPU's memory to the
// others'.
class NcclCoded {
 public:
  using Ranks = std::vector<std::unique_ptr<DeviceRank>>;

  // Args: topology: whose ranks are GPUs; ranks: this process's.
  NcclCoded(const Topology& topology, const Ranks& ranks);
  ~NcclCoded();

  // Whether it can run an operation of which something is encoded; all ranks say the same.
  bool Takes(const Parts& parts) const;
  // Whether what was launched has to end before there is room for one that it takes.
  bool IsFull(const Parts& parts) const;
  // Makes room for it, if it has ended; whether all ranks have. Args: lack: why there is none here.
  bool MakeRoom(Fabric& fabric, const Operation& operation, const Parts& parts, std::string* lack);

  // Has the GPUs' streams run an operation for which there is room; returns at once.
  void Launch(const Parts& parts);

 private:
  struct Lane;
  class Share;

  void Allocate(size_t bytes);
  const Topology& Groups(size_t gpu, const Operation& part) const;

  const Ranks& ranks_;
  // All ranks as each of these GPUs sees them, on hosts, and with processes in the place of hosts.
  std::vector<Topology> hosts_, processes_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // one for each GPU, once there is room
  size_t agreed_ = 0;                         // for so many encoded bytes all ranks have room,
  size_t refused_ = SIZE_MAX;                 // and for so many one has none
};

// The GPUs of a process as ranks of NCCL, which one thread launches together.
class NcclRanks {
 public:
  struct Setup {
    nccl::UniqueId id;
    size_t first;         // of this process's ranks
    int size;             // of all processes
    size_t buffer_bytes;  // for small tensors that are put together; the same on all ranks
    double timeout_seconds;
    bool fuses;                                    // whether all-reduces are to come
    std::function<void(const std::string&)> warn;  // may be empty
  };

  // Joins the others. All processes call this within one operation.
  // Args: this process's GPUs, whose `nccl` and `fusion` are made; what may end waits.
  NcclRanks(Fabric& fabric, const Operation& operation,
            std::vector<std::unique_ptr<DeviceRank>>& ranks, const Setup& setup, Guard& guard);

  // Has the GPUs' streams run a collective, or a message; returns at once.
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
