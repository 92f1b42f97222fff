// Waits of streams for one another, and measured times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "device/gpu.h"
#include "device/kernels/staging.h"
#include "error.h"

namespace tfdist {

// How the host waits for a GPU.
//
// Waits until something on a GPU has passed, or for what ends the wait.
void AwaitPassed(const std::function<bool()>& has_passed, const std::function<bool()>& ends);

// Waits until a point in a stream has passed. The guard may end the wait by an Error, and so may
// `check`, if there is one, which is called now and then.
void Await(const DeviceEvent& event, Guard& guard, const std::function<void()>& check = {});

// Waits for what a stream was given, but not for long; whether that has passed. For ends after a
// failure, where nothing can be done about another one.
bool SettleSoon(cuda::Stream* stream, DeviceEvent& event) noexcept;

// Where ranks meet whose streams wait by themselves, so that nothing occupies a GPU meanwhile: for
// ranks that share one, where a kernel that waits may keep the one that it waits for from running.
//
// The words are in memory that a host's processes share: there the host ends a wait at once,
// whatever the GPU's queues hold. A meeting has words of its own until it is over everywhere, so
// what another rank writes late takes no end of a wait back.
class StreamMeetings {
 public:
  // How many meetings have words: at most so many may not be over yet.
  static constexpr uint64_t kMost = device::kMostBlocks;
  static constexpr size_t kWordBytes =
      device::kMostRanks * device::kMeetingWords * sizeof(uint64_t);

  // Args: kWordBytes that all ranks share, zero at the start.
  StreamMeetings(const Gpu& gpu, void* words, uint32_t rank, uint32_t ranks);

  // The words of a rank for a meeting, as kernels of this one's GPU see them.
  uint64_t* WordsOf(uint32_t rank, uint64_t meeting) const;
  // Has a stream wait until all other ranks have told this one that they have come.
  void Await(uint64_t meeting, cuda::Stream* stream) const;
  // Ends all waits of this rank; from any thread.
  void Release() noexcept;

 private:
  const Gpu& gpu_;
  uint64_t* const words_;
  const RegisteredMemory memory_;
  const uint32_t rank_;
  const uint32_t ranks_;
};

// Which of two ways is the faster one for all-reduces of each size, by trying.
//
// The sizes that are tried, ascending.
std::vector<size_t> TriedSizes();

// Up to how many bytes the first way is faster; 0 if it never is.
// Args:
//   seconds: how long an all-reduce of so many bytes takes by the first way, or by the second.
//   slowest: the same numbers, each the largest of all ranks; so that all come to one result.
size_t WhereFirstIsFaster(
    const std::function<double(bool first, size_t bytes)>& seconds,
    const std::function<std::vector<double>(const std::vector<double>&)>& slowest);

}  // namespace tfdist
