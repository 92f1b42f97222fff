// The GPUs of a process as ranks of NCCL, which one thread launches together.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/at_once.h"
#include "device/device_rank.h"
#include "device/parts.h"
#include "guard.h"
#include "transport/fabric.h"

namespace tfdist {

class NcclRanks {
 public:
  struct Setup {
    nccl::UniqueId id;
    size_t first;         // of this process's ranks
    int size;             // of all processes
    size_t buffer_bytes;  // for small tensors that are put together; the same on all ranks
    double timeout_seconds;
    bool fuses;           // whether all-reduces are to come
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
