// Compressed all-reduces among GPUs by NCCL: what is encoded goes from one GPU's memory to the others'.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "device/device_rank.h"
#include "device/parts.h"
#include "transport/fabric.h"

namespace tfdist {

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
  size_t agreed_ = 0;          // for so many encoded bytes all ranks have room,
  size_t refused_ = SIZE_MAX;  // and for so many one has none
};

}  // namespace tfdist
