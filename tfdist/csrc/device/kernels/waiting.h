// What kernels need to wait for those of other ranks: words in each rank's memory that the others
// write. Every wait ends: when the host says so, or after a time.
#pragma once

#include <cstdint>

namespace tfdist::device {

constexpr uint32_t kMostRanks = 16;
constexpr uint32_t kMostBlocks = 32;  // of a kernel whose blocks meet those of other ranks
constexpr uint32_t kMeetingWords = kMostBlocks * kMostRanks;

// Why a rank waits no longer; written to the host's memory.
enum class Outcome : uint64_t { kRunning, kAborted, kLate };

struct Waiting {
  const uint64_t* abort;  // in the host's memory: not 0 to give up
  uint64_t* outcome;      // in the host's memory
  uint64_t* ended;        // in the GPU's own, for the kernels behind: not 0 once there is an outcome
  uint64_t nanoseconds;   // how long at most
};

// Where the ranks of a host meet. Each has a word of each other one's in its memory, for each block.
struct Meeting {
  uint32_t rank;
  uint32_t ranks;
  uint64_t number;              // of this meeting; one more each time
  uint64_t* words[kMostRanks];  // of each rank: those for a block lie together
};

}  // namespace tfdist::device
