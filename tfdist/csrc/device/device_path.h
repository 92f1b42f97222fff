// How a communicator runs collectives of what is on GPUs: the processes arrive on the host, so that
// nothing waits on a GPU for a rank that never comes, then the data go one of three ways.
//
// Each GPU is a rank of these collectives: those of the first process come first, in their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "collective/operation.h"
#include "device/compressed_path.h"
#include "device/device_rank.h"
#include "device/device_setup.h"
#include "device/gpu.h"
#include "device/host_staged.h"
#include "device/launch_order.h"
#include "device/nccl_ranks.h"
#include "device/routes.h"
#include "error.h"
#include "transport/fabric.h"

namespace tfdist {

class DevicePath {
 public:
  using Setup = DeviceSetup;
  using OnHost = HostStaged::OnHost;

  // Args: what ends waits early. Talks to nobody; throws Error where a GPU cannot be used.
  DevicePath(Setup setup, Guard& guard);
  ~DevicePath();
  DevicePath(const DevicePath&) = delete;
  DevicePath& operator=(const DevicePath&) = delete;

  // Waits until a point in the program's stream has passed, or for what ends the wait; an error of
  // the GPU shows in what is run next. Args: which GPU brings the part.
  void AwaitInput(size_t gpu, const Operation& part,
                  const std::function<bool()>& ends) const noexcept;

  // Runs an operation whose memory is the GPUs', and waits for its result, unless it has only
  // launched it, and returns so. Args: how one is run whose memory is the host's.
  bool Run(Fabric& fabric, Operation& operation, const OnHost& on_host);

  // Waits for the results of what was only launched. Throws Error if that has failed.
  void AwaitLaunched();
  // Whether there is something to wait for.
  bool HasLaunched() const { return !launched_.empty(); }
  // Whether the GPUs have come to the end of what was launched.
  bool HasPassed() const;
  // Ends what has been launched, here and on the other ranks, whose memory it may use.
  void GiveUp() noexcept;

  // Of what has gone from GPU to GPU: what each of this process's brought or got, whichever is
  // more.
  uint64_t moved_bytes() const { return moved_bytes_; }

  // The GPUs of this process; they may live longer than the path.
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }
  // The kernels of a process with one GPU, for what its program runs there by itself; null for
  // none, and where all goes through the host's memory.
  std::shared_ptr<const KernelModule> kernels() const;

  // At the end, where nothing has failed: waits, but not for long, until this process's GPUs have
  // read what they need of the others' memory. Whether others may still read this process's.
  bool Leave();

 private:
  using Transport = Routes::Transport;

  Transport Choose(Fabric& fabric, Operation& operation, const Parts& parts);
  bool MayStay(const Fabric& fabric, const Operation& operation) const;
  void Copy(Fabric& fabric, const Operation& operation);
  void Count(const Operation& part);
  void Arrive(Fabric& fabric, const Operation& operation, const Parts& parts);
  void MakeRoom(Fabric& fabric, const Operation& operation, const Parts& parts);
  std::deque<LaunchOrder::Turn> AwaitTurn(Fabric& fabric, const Operation& operation);
  void HoldBack(const Parts& parts) const;
  void Launch(Fabric& fabric, const Operation& operation, const Parts& parts);
  void LaunchKernels(const Fingerprint& asked, const Parts& parts);
  void JoinNccl(Fabric& fabric, const Operation& operation);
  void Measure(Fabric& fabric, const Operation& operation);
  void CheckRoot(const Fingerprint& asked) const;
  void Poll() const;
  void AwaitResult();

  const Setup setup_;
  Guard& guard_;
  std::vector<std::unique_ptr<DeviceRank>> ranks_;  // this process's
  std::vector<std::shared_ptr<const Gpu>> gpus_;
  HostStaged host_;
  Routes routes_;
  bool measured_ = false;
  std::unique_ptr<NcclRanks> nccl_;        // made when it is used first
  std::unique_ptr<MessageCopies> copies_;  // likewise
  CompressedPath compressed_;
  std::vector<std::shared_ptr<void>> launched_;  // what these operations refer to
  uint64_t moved_bytes_ = 0;
};

}  // namespace tfdist
