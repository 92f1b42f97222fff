// Where ranks meet whose streams wait by themselves, so that nothing occupies a GPU meanwhile: for ranks
// that share one, where a kernel that waits may keep the one that it waits for from running.
//
// The words are in memory that a host's processes share: there the host ends a wait at once, whatever
// the GPU's queues hold. A meeting has words of its own until it is over everywhere, so what another
// rank writes late takes no end of a wait back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/gpu.h"
#include "device/kernels/waiting.h"

namespace tfdist {

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

}  // namespace tfdist
