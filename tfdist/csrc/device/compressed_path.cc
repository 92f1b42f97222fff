#include "device/compressed_path.h"

#include <utility>

#include "error.h"

namespace tfdist {

bool CompressedPath::GoesByNccl(Fabric& fabric, const Operation& operation, const Parts& parts,
                                const std::function<void()>& settle) {
  routes_.Open(fabric, operation);
  if (routes_.ChooseForCompressed() != Routes::Transport::kNccl) return false;
  if (!by_nccl_) by_nccl_ = std::make_unique<NcclCoded>(routes_.topology(), ranks_);
  if (!by_nccl_->Takes(parts)) return false;
  if (by_nccl_->IsFull(parts)) settle();
  std::string lack;
  if (by_nccl_->MakeRoom(fabric, operation, parts, &lack)) return true;
  if (!lack.empty()) Announce(lack);
  return false;
}

bool CompressedPath::RunOverLinks(const Topology& topology, Operation& operation,
                                  const DeviceCoder::OnHost& on_host) {
  const bool may = ranks_.size() == 1 && ranks_[0]->kernels && setup_.transport != "host";
  if (!may || !DeviceCoder::Takes(topology, operation)) return false;
  try {
    if (!over_links_) {
      over_links_ = std::make_unique<DeviceCoder>(*ranks_[0]->gpu, *ranks_[0]->kernels, guard_);
    }
    over_links_->MakeRoom(topology, operation);
  } catch (const Error& error) {
    Announce(error.what());
    return false;
  }
  over_links_->Run(operation, on_host);
  return true;
}

// Says once why values, or encoded ones, do not stay on the GPU.
void CompressedPath::Announce(const std::string& lack) {
  if (!setup_.warn || std::exchange(announced_, true)) return;
  setup_.warn("Compressed gradients go through the host's memory, since " + lack);
}

}  // namespace tfdist
