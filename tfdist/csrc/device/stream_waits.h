// Lets streams wait for each other, and measures times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "device/gpu.h"
#include "device/kernels/staging.h"
#include "error.h"

namespace tfdist {

// Makes the host wait for a GPU, until `has_passed` or `ends` returns true.
void AwaitPassed(const std::function<bool()>& has_passed, const std::function<bool()>& ends);

// Waits until an event has passed. The guard may end the wait with an Error, and so may `check`, if
// any, which is called periodically.
void Await(const DeviceEvent& event, Guard& guard, const std::function<void()>& check = {});

// Waits briefly for a stream's queued work, and returns whether it has finished. For cleanup after
// a failure, when a further error cannot be handled.
bool SettleSoon(cuda::Stream* stream, DeviceEvent& event) noexcept;

// Synchronizes ranks by stream waits, so that no waiting kernel occupies a GPU. This is for ranks
// that share a GPU, where a waiting kernel may prevent the awaited kernel from running.
//
// The words are in memory shared by a host's processes, so the host can end a wait at once,
// regardless of the GPU's queues. A barrier keeps its own words until it is over on all ranks, so
// another rank's late write cannot undo the end of a wait.
class StreamBarriers {
 public:
  // The number of barriers with words: the maximum number of unfinished barriers.
  static constexpr uint64_t kMax = device::kMaxBlocks;
  static constexpr size_t kWordBytes = device::kMaxRanks * device::kBarrierWords * sizeof(uint64_t);

  // Args: kWordBytes shared by all ranks, zero-filled.
  StreamBarriers(const Gpu& gpu, void* words, uint32_t rank, uint32_t ranks);

  // The words of a rank for a barrier, as seen by kernels of this rank's GPU.
  uint64_t* WordsOf(uint32_t rank, uint64_t barrier) const;
  // Makes a stream wait until all other ranks have reported their arrival.
  void Await(uint64_t barrier, cuda::Stream* stream) const;
  // Ends all waits of this rank; may be called from any thread.
  void Release() noexcept;

 private:
  const Gpu& gpu_;
  uint64_t* const words_;
  const RegisteredMemory memory_;
  const uint32_t rank_;
  const uint32_t ranks_;
};

// The sizes of all-reduces that `WhereFirstIsFaster` measures, ascending.
std::vector<size_t> TriedSizes();

// Returns the largest size in bytes for which the first transport is faster; 0 if it never is.
// Args: seconds: the time of an all-reduce of `bytes` bytes by the first or the second transport.
// slowest: returns the maximum of each number over all ranks, so that all ranks get the same
// result.
size_t WhereFirstIsFaster(
    const std::function<double(bool first, size_t bytes)>& seconds,
    const std::function<std::vector<double>(const std::vector<double>&)>& slowest);

}  // namespace tfdist
