// Staging buffers, and waits for other GPUs.
#pragma once

#include <cstdint>

// What kernels need to wait for those of other ranks: words in each rank's memory that the others
// write. Every wait ends: when the host says so, or after a time.

namespace tfdist::device {

constexpr uint32_t kMostRanks = 16;
constexpr uint32_t kMostBlocks = 32;  // of a kernel whose blocks meet those of other ranks
constexpr uint32_t kMeetingWords = kMostBlocks * kMostRanks;

// Why a rank waits no longer; written to the host's memory.
enum class Outcome : uint64_t { kRunning, kAborted, kLate };

struct Waiting {
  const uint64_t* abort;  // in the host's memory: not 0 to give up
  uint64_t* outcome;      // in the host's memory
  uint64_t* ended;       // in the GPU's own, for the kernels behind: not 0 once there is an outcome
  uint64_t nanoseconds;  // how long at most
};

// Where the ranks of a host meet. Each has a word of each other one's in its memory, for each
// block.
struct Meeting {
  uint32_t rank;
  uint32_t ranks;
  uint64_t number;              // of this meeting; one more each time
  uint64_t* words[kMostRanks];  // of each rank: those for a block lie together
};

}  // namespace tfdist::device

// The buffers that the ranks of a host put their values into, where the others read them.
//
// Each rank has two, and takes them in turn. A buffer is free again when its rank's next-but-one
// collective begins: all have then come to the meeting of the one between, and so have read it.

namespace tfdist::device {

struct Staging {
  char* of[kMostRanks];  // of each rank, as this one sees it
  uint32_t rank;
  uint32_t ranks;
  uint64_t part;  // vectors that each rank reduces in two shots; the last ranks may have fewer
};

}  // namespace tfdist::device
