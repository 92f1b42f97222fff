// Runs collectives through NCCL. The all-reduces may be compressed.
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

// Runs compressed all-reduces among GPUs through NCCL. NCCL sends the encoded values from the
// memory of one GPU to the memory of another GPU.
class NcclCoded {
 public:
  using Ranks = std::vector<std::unique_ptr<DeviceRank>>;

  // Args: topology: the topology in which each GPU is a rank; ranks: the GPUs of this process.
  NcclCoded(const Topology& topology, const Ranks& ranks);
  ~NcclCoded();

  // Returns whether this class can run a compressed operation. The result is the same on all ranks.
  bool Takes(const Parts& parts) const;
  // Returns whether an operation needs memory that earlier launches may still use. If so, these
  // launches must end before `MakeRoom` is called.
  bool IsFull(const Parts& parts) const;
  // Provides the memory for an operation. Allocates it if necessary. Returns whether all ranks have
  // enough memory; the result is the same on all ranks.
  // Args: lack: receives the reason if this rank does not have enough memory.
  bool MakeRoom(Fabric& fabric, const Operation& operation, const Parts& parts, std::string* lack);

  // Queues an operation in the streams of this process's GPUs, and returns immediately. `MakeRoom`
  // must have returned true for this operation.
  void Launch(const Parts& parts);

 private:
  struct Lane;
  class Share;

  void Allocate(size_t bytes);
  const Topology& Groups(size_t gpu, const Operation& part) const;

  const Ranks& ranks_;
  // Two topologies of all ranks, for each GPU of this process. In `hosts_`, the ranks are grouped
  // by host. In `processes_`, the ranks are grouped by process: the ranks of each process form a
  // "host".
  std::vector<Topology> hosts_, processes_;
  // The resources on each GPU. This list is empty until memory has been allocated.
  std::vector<std::unique_ptr<Lane>> lanes_;
  // All ranks have memory for operations that need at most `agreed_` bytes. At least one rank did
  // not have enough memory for an operation that needed `refused_` bytes.
  size_t agreed_ = 0;
  size_t refused_ = SIZE_MAX;
};

// The GPUs of this process, as ranks of an NCCL communicator. A single thread launches the work of
// all these GPUs.
class NcclRanks {
 public:
  struct Setup {
    nccl::UniqueId id;
    size_t first;         // the first rank of this process
    int size;             // the number of ranks of all processes
    size_t buffer_bytes;  // the size of the fusion buffer, which is the same on all ranks
    double timeout_seconds;
    // Whether to create fusion buffers. A communicator that only sends messages does not need them.
    bool fuses;
    std::function<void(const std::string&)> warn;  // receives warnings; may be empty
  };

  // Joins the NCCL communicator, and waits until the other ranks have joined. All processes create
  // this object during the same operation, because they communicate while they create it.
  // Args: ranks: the GPUs of this process; the constructor sets their members `nccl` and `fusion`;
  // guard: a `Guard` that is checked during every wait, and can end the wait by throwing an Error.
  NcclRanks(Fabric& fabric, const Operation& operation,
            std::vector<std::unique_ptr<DeviceRank>>& ranks, const Setup& setup, Guard& guard);

  // Queues a collective or a message in the streams of this process's GPUs, and returns
  // immediately.
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
