// Runs collectives on device memory. One of three transports moves the data: the host, NCCL, or
// tfdist's own kernels and copies, which access the memory of other GPUs. Before the GPUs begin a
// collective in which they wait for each other, the ranks synchronize on the host. A GPU therefore
// never waits for a rank that has not joined the collective.
//
// In these collectives, each GPU is a rank. The GPUs are in the order of their processes. The GPUs
// of one process are in the order of `DeviceSetup::gpus`.
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

  // The constructor does not contact other ranks. It throws Error if a GPU cannot be used.
  // Args: guard: a `Guard` that is checked during every wait, and can end the wait by throwing an
  // Error.
  DevicePath(Setup setup, Guard& guard);
  ~DevicePath();
  DevicePath(const DevicePath&) = delete;
  DevicePath& operator=(const DevicePath&) = delete;

  // Waits until the event of a part has passed, so that the GPU may use the memory of the part.
  // Returns earlier if `ends` returns true. If the GPU has failed, this function does not throw an
  // error, but the next operation does.
  // Args: gpu: the index of the part's GPU in this process; part: the part of an operation.
  void AwaitInput(size_t gpu, const Operation& part,
                  const std::function<bool()>& ends) const noexcept;

  // Runs an operation on device memory. Usually, waits for the result and returns false. If the
  // operation may end when it has been launched (see `Operation::launches`), the function may
  // return true without waiting for the result.
  // Args: on_host: a function that runs an operation on host memory.
  bool Run(Fabric& fabric, Operation& operation, const OnHost& on_host);

  // Waits until all launched operations have ended. Throws Error if one of them has failed.
  void AwaitLaunched();
  // Returns whether operations have been launched since this object last waited for all launched
  // operations.
  bool HasLaunched() const { return !launched_.empty(); }
  // Returns whether the GPUs have finished all launched operations. Does not wait.
  bool HasPassed() const;
  // Aborts the launched operations on all GPUs of this process, and waits briefly until they have
  // ended. It aborts them on all GPUs because an operation on one GPU may use the memory of another
  // GPU.
  void GiveUp() noexcept;

  // Returns the number of bytes that operations have moved between GPUs without passing through
  // host memory. For each GPU of this process, an operation adds the size of its input or the size
  // of its output, whichever is larger.
  uint64_t moved_bytes() const { return moved_bytes_; }

  // Returns the GPUs of this process. The caller may keep them longer than this object.
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }
  // Returns the kernels with which this process's GPU runs operations that need no communication.
  // Returns null if the process has several GPUs, if there are no compiled kernels, or if the
  // settings request that all data pass through host memory.
  std::shared_ptr<const KernelModule> kernels() const;

  // Prepares to close a communicator that has not failed. Waits briefly until the GPUs of this
  // process have finished reading the memory of other ranks. Returns whether other ranks may still
  // be reading the memory of this process. If so, the caller must wait for these ranks before it
  // destroys this object.
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
  // The objects that launched operations use. They must stay alive until these operations have
  // ended.
  std::vector<std::shared_ptr<void>> launched_;
  uint64_t moved_bytes_ = 0;
};

}  // namespace tfdist
