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

// Runs compressed all-reduces among GPUs through NCCL. Encoded values are sent from the memory of
// one GPU to the memory of another GPU.
class NcclCoded {
 public:
  using Ranks = std::vector<std::unique_ptr<DeviceRank>>;

  // Args: topology: the topology in which each GPU is a rank; ranks: the GPUs of this process.
  NcclCoded(const Topology& topology, const Ranks& ranks);
  ~NcclCoded();

  // Returns whether this class can run a compressed operation. The result is the same on all ranks.
  bool Takes(const Parts& parts) const;
  // Returns whether earlier launches must end before there is memory for an operation.
  bool IsFull(const Parts& parts) const;
  // Allocates the memory for an operation, after earlier launches have ended. Returns whether all
  // ranks have enough memory.
  // Args: lack: receives the reason if this rank does not have enough memory.
  bool MakeRoom(Fabric& fabric, const Operation& operation, const Parts& parts, std::string* lack);

  // Queues an operation in the GPUs' streams, and returns immediately. `MakeRoom` must have
  // returned true for this operation.
  void Launch(const Parts& parts);

 private:
  struct Lane;
  class Share;

  void Allocate(size_t bytes);
  const Topology& Groups(size_t gpu, const Operation& part) const;

  const Ranks& ranks_;
  // For each GPU of this process, the topology of all ranks: in `hosts_`, the ranks are grouped by
  // host; in `processes_`, they are grouped by process.
  std::vector<Topology> hosts_, processes_;
  // One for each GPU. Empty until memory has been allocated.
  std::vector<std::unique_ptr<Lane>> lanes_;
  // All ranks have memory for `agreed_` encoded bytes, and some rank does not have memory for
  // `refused_` encoded bytes.
  size_t agreed_ = 0;
  size_t refused_ = SIZE_MAX;
};

// The GPUs of this process as ranks of an NCCL communicator. One thread launches the work of all of
// them.
class NcclRanks {
 public:
  struct Setup {
    nccl::UniqueId id;
    size_t first;         // the first rank of this process
    int size;             // number of ranks of all processes
    size_t buffer_bytes;  // size of the buffer for small tensors; the same on all ranks
    double timeout_seconds;
    bool fuses;                                    // whether all-reduces will follow
    std::function<void(const std::string&)> warn;  // may be empty
  };

  // Joins the ranks of the other processes. All processes call this function within the same
  // operation.
  // Args: ranks: the GPUs of this process; the function sets their `nccl` and `fusion`; guard: may
  // end waits.
  NcclRanks(Fabric& fabric, const Operation& operation,
            std::vector<std::unique_ptr<DeviceRank>>& ranks, const Setup& setup, Guard& guard);

  // Queues a collective or a message in the GPUs' streams, and returns immediately.
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
