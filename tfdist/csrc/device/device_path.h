// Runs collectives on device memory. Ranks first synchronize on the host, so that no GPU waits for
// a missing rank; then one of three transports moves the data.
//
// Each GPU is a rank of these collectives, in the order of processes and of each process's GPUs.
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

  // Args: a guard that ends waits early. Contacts no other rank; throws Error if a GPU is unusable.
  DevicePath(Setup setup, Guard& guard);
  ~DevicePath();
  DevicePath(const DevicePath&) = delete;
  DevicePath& operator=(const DevicePath&) = delete;

  // Waits until the part's event has passed, or until `ends` returns true. A GPU error surfaces in
  // the next operation. Args: the index of the GPU that contributes the part.
  void AwaitInput(size_t gpu, const Operation& part,
                  const std::function<bool()>& ends) const noexcept;

  // Runs an operation on device memory and waits for its result. Returns true if the operation was
  // only launched. Args: a function that runs an operation on host memory.
  bool Run(Fabric& fabric, Operation& operation, const OnHost& on_host);

  // Waits for launched operations. Throws Error if one has failed.
  void AwaitLaunched();
  // Whether launched operations are pending.
  bool HasLaunched() const { return !launched_.empty(); }
  // Whether the GPUs have finished all launched operations.
  bool HasPassed() const;
  // Aborts launched operations here and on the other ranks, since the operations here may use the
  // other ranks' memory.
  void GiveUp() noexcept;

  // Bytes moved between GPUs: the larger of the input and the output of each of this process's
  // GPUs.
  uint64_t moved_bytes() const { return moved_bytes_; }

  // The GPUs of this process; they may outlive the path.
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }
  // The kernels of a single-GPU process, for operations without communication. Null if there are no
  // kernels, or if all data pass through host memory.
  std::shared_ptr<const KernelModule> kernels() const;

  // Waits briefly, at a close without failure, until this process's GPUs have finished reading
  // other ranks' memory. Returns whether other ranks may still read this process's memory.
  bool Leave();

 private:
  using Transport = Routes::Transport;

  Transport Choose(Fabric& fabric, Operation& operation, const Parts& parts);
  bool MayStay(const Fabric& fabric, const Operation& operation) const;
  void Copy(Fabric& fabric, const Operation& operation);
  void Count(const Operation& part);
  void Arrive(Fabric& fabric, const Operation& operation, const Parts& parts);
  void AllocateGathered(Fabric& fabric, const Operation& operation, const Parts& parts);
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
  std::vector<std::unique_ptr<DeviceRank>> ranks_;  // one per GPU of this process
  std::vector<std::shared_ptr<const Gpu>> gpus_;
  HostStaged host_;
  Routes routes_;
  bool measured_ = false;
  std::unique_ptr<NcclRanks> nccl_;        // created on first use
  std::unique_ptr<MessageCopies> copies_;  // likewise
  CompressedPath compressed_;
  std::vector<std::shared_ptr<void>> launched_;  // keeps their referenced objects alive
  uint64_t moved_bytes_ = 0;
};

}  // namespace tfdist
