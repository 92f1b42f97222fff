// Which way the compressed all-reduces of a communicator go, and what runs them: encoded values go from
// GPU to GPU by NCCL, or over the host's links.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device_coder.h"
#include "device/device_rank.h"
#include "device/device_setup.h"
#include "device/nccl_coded.h"
#include "device/parts.h"
#include "device/routes.h"
#include "guard.h"
#include "transport/fabric.h"

namespace tfdist {

class CompressedPath {
 public:
  // Args: ranks: this process's GPUs; guard: ends waits early.
  CompressedPath(const DeviceSetup& setup, const Routes::Ranks& ranks, Routes& routes, Guard& guard)
      : setup_(setup), ranks_(ranks), routes_(routes), guard_(guard) {}

  // Whether an operation goes by NCCL, as all ranks find out together, and make room for it.
  // Args: settle: waits for what was launched before.
  bool GoesByNccl(Fabric& fabric, const Operation& operation, const Parts& parts,
                  const std::function<void()>& settle);
  // Has the GPUs' streams run one that does.
  void Launch(const Parts& parts) { by_nccl_->Launch(parts); }

  // Runs one that does not, if this process's kernels can. Args: how one is run on the host.
  bool RunOverLinks(const Topology& topology, Operation& operation,
                    const DeviceCoder::OnHost& on_host);

 private:
  void Announce(const std::string& lack);

  const DeviceSetup& setup_;
  const Routes::Ranks& ranks_;
  Routes& routes_;
  Guard& guard_;
  std::unique_ptr<NcclCoded> by_nccl_;      // made when it is used first
  std::unique_ptr<DeviceCoder> over_links_;  // the same
  bool announced_ = false;
};

}  // namespace tfdist
