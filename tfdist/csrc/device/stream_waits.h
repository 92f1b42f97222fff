// Makes streams wait for other ranks, makes the host wait for GPUs, and compares two transports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "device/gpu.h"
#include "device/kernels/staging.h"
#include "error.h"

namespace tfdist {

// Waits on the host until `has_passed` or `ends` returns true.
void AwaitPassed(const std::function<bool()>& has_passed, const std::function<bool()>& ends);

// Waits on the host until an event has passed. The guard may end this wait with an Error. If
// `check` is given, it is called periodically, and may also end the wait with an Error.
void Await(const DeviceEvent& event, Guard& guard, const std::function<void()>& check = {});

// Waits briefly until the queued work of a stream has finished, and returns whether it has
// finished. This is for cleanup after a failure, when another error cannot be handled.
bool SettleSoon(cuda::Stream* stream, DeviceEvent& event) noexcept;

// Synchronizes ranks by streams that wait, so that no kernel occupies a GPU while it waits. This is
// for ranks that share a GPU: there, a kernel that waits may prevent the kernel for which it waits
// from running.
//
// The streams wait for words in memory that the processes of a host share. The host can therefore
// end a wait immediately, regardless of the GPU's queues. Each barrier has its own words until it
// is over on all ranks, so a late write of another rank cannot undo the end of a wait.
class StreamBarriers {
 public:
  // The number of barriers that have words. It is the maximum number of unfinished barriers.
  static constexpr uint64_t kMax = device::kMaxBlocks;
  static constexpr size_t kWordBytes = device::kMaxRanks * device::kBarrierWords * sizeof(uint64_t);

  // Args: words: kWordBytes bytes of memory that all ranks share, filled with zeros.
  StreamBarriers(const Gpu& gpu, void* words, uint32_t rank, uint32_t ranks);

  // Returns the words of a rank for a barrier. The address is valid in kernels of this rank's GPU.
  uint64_t* WordsOf(uint32_t rank, uint64_t barrier) const;
  // Makes a stream wait until all other ranks have signaled their arrival.
  void Await(uint64_t barrier, cuda::Stream* stream) const;
  // Ends all waits of this rank. May be called from any thread.
  void Release() noexcept;

 private:
  const Gpu& gpu_;
  uint64_t* const words_;
  const RegisteredMemory memory_;
  const uint32_t rank_;
  const uint32_t ranks_;
};

// Returns the sizes of the all-reduces that `WhereFirstIsFaster` measures, in ascending order.
std::vector<size_t> TriedSizes();

// Compares two transports. Returns the size in bytes up to which the first transport is faster, or
// 0 if it is never faster.
// Args: seconds: measures the time of an all-reduce of `bytes` bytes by the first or the second
// transport; slowest: returns the maximum of each number over all ranks, so that all ranks get the
// same result.
size_t WhereFirstIsFaster(
    const std::function<double(bool first, size_t bytes)>& seconds,
    const std::function<std::vector<double>(const std::vector<double>&)>& slowest);

}  // namespace tfdist
