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

// Blocks the calling thread until `has_passed` or `ends` returns true.
void AwaitPassed(const std::function<bool()>& has_passed, const std::function<bool()>& ends);

// Blocks the calling thread until an event has passed. Periodically calls `guard.Check` and, if it
// is given, `check`. Both may end the wait by throwing an Error.
void Await(const DeviceEvent& event, Guard& guard, const std::function<void()>& check = {});

// Waits until the stream has finished its queued work, but only for a short time. Returns whether
// the work has finished. This function is for the cleanup after a failure, where a second error
// could not be handled, so it does not throw.
// Args: event: an event that this function records in the stream.
bool SettleSoon(cuda::Stream* stream, DeviceEvent& event) noexcept;

// Makes streams wait for other ranks, so that no kernel occupies a GPU while it waits. This is for
// ranks that share a GPU. If kernels waited there, a waiting kernel could block the very kernel for
// which it waits.
//
// The streams wait for words in host memory that the processes of a host share. The host can write
// to these words, and thereby end a wait immediately, even if the GPU is busy.
//
// Until all ranks have passed a barrier, no other barrier uses the same words. Otherwise, a wait
// might never end: the host writes to a word to end the wait, but another rank then overwrites this
// word with the number of an earlier barrier, and the stream continues to wait.
class StreamBarriers {
 public:
  // The number of barriers that have their own words. More barriers must not be pending at the same
  // time.
  static constexpr uint64_t kMax = device::kMaxBlocks;
  static constexpr size_t kWordBytes = device::kMaxRanks * device::kBarrierWords * sizeof(uint64_t);

  // Args: words: memory of kWordBytes bytes that all ranks of the host share, and that initially
  // contains zeros.
  StreamBarriers(const Gpu& gpu, void* words, uint32_t rank, uint32_t ranks);

  // Returns the address of a rank's words for a barrier. The kernels of this rank's GPU can use
  // this address.
  uint64_t* WordsOf(uint32_t rank, uint64_t barrier) const;
  // Makes a stream wait until all other ranks have signaled that they have arrived at the barrier.
  void Await(uint64_t barrier, cuda::Stream* stream) const;
  // Ends all waits of this rank's stream. May be called from any thread.
  void Release() noexcept;

 private:
  const Gpu& gpu_;
  uint64_t* const words_;
  const RegisteredMemory memory_;
  const uint32_t rank_;
  const uint32_t ranks_;
};

// Returns the sizes of the all-reduces that `WhereFirstIsFaster` measures. They are in bytes, in
// ascending order.
std::vector<size_t> TriedSizes();

// Compares the first and the second of two transports. Returns the size in bytes up to which the
// first transport is faster. Returns 0 if it is never faster.
// Args: seconds: a function that measures how many seconds the first or the second transport needs
// for an all-reduce of `bytes` bytes; slowest: a function that receives numbers which this rank has
// measured, and returns the maximum of each number over all ranks. With these maximums, all ranks
// get the same result.
size_t WhereFirstIsFaster(
    const std::function<double(bool first, size_t bytes)>& seconds,
    const std::function<std::vector<double>(const std::vector<double>&)>& slowest);

}  // namespace tfdist
