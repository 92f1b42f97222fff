// Runs collectives on device memory. First, the ranks synchronize on the host, so that no GPU waits
// for a missing rank. Then one of three transports moves the data.
//
// In these collectives, each GPU is a rank. The GPUs are in the order of the processes, and within
// a process in the order of the process's GPUs.
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

  // Does not contact other ranks. Throws Error if a GPU is unusable.
  // Args: guard: ends waits early.
  DevicePath(Setup setup, Guard& guard);
  ~DevicePath();
  DevicePath(const DevicePath&) = delete;
  DevicePath& operator=(const DevicePath&) = delete;

  // Waits until the event of a part has passed, or until `ends` returns true. If the GPU fails, the
  // next operation throws the error.
  // Args: gpu: the index of the GPU that contributes the part.
  void AwaitInput(size_t gpu, const Operation& part,
                  const std::function<bool()>& ends) const noexcept;

  // Runs an operation on device memory and waits for its result. If the operation is only launched,
  // returns true without waiting.
  // Args: on_host: a function that runs an operation on host memory.
  bool Run(Fabric& fabric, Operation& operation, const OnHost& on_host);

  // Waits until the launched operations have ended. Throws Error if one of them has failed.
  void AwaitLaunched();
  // Returns whether there are launched operations for which `AwaitLaunched` has not waited.
  bool HasLaunched() const { return !launched_.empty(); }
  // Returns whether the GPUs have finished all launched operations.
  bool HasPassed() const;
  // Aborts the launched operations on this rank and on the other ranks. The other ranks must be
  // included because operations on this rank may use their memory.
  void GiveUp() noexcept;

  // Returns the number of bytes that have been moved between GPUs. Each operation adds the size of
  // its input or of its output, whichever is larger, for each GPU of this process.
  uint64_t moved_bytes() const { return moved_bytes_; }

  // Returns the GPUs of this process. They may outlive this object.
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }
  // Returns the kernels of a process with a single GPU, for operations that need no communication.
  // Returns null if the process has several GPUs, if there are no kernels, or if all data must pass
  // through host memory.
  std::shared_ptr<const KernelModule> kernels() const;

  // Prepares the closing of a communicator that has not failed. Waits briefly until the GPUs of
  // this process have finished reading the memory of other ranks. Returns whether other ranks may
  // still read the memory of this process.
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
  std::vector<std::unique_ptr<DeviceRank>> ranks_;  // one for each GPU of this process
  std::vector<std::shared_ptr<const Gpu>> gpus_;
  HostStaged host_;
  Routes routes_;
  bool measured_ = false;
  std::unique_ptr<NcclRanks> nccl_;        // created on first use
  std::unique_ptr<MessageCopies> copies_;  // created on first use
  CompressedPath compressed_;
  // Objects that launched operations use. They are kept alive until these operations have ended.
  std::vector<std::shared_ptr<void>> launched_;
  uint64_t moved_bytes_ = 0;
};

}  // namespace tfdist
