// Lets kernels wait for the kernels of other ranks.
#pragma once

#include <cstdint>

#include "device/kernels/execution.h"
#include "device/kernels/staging.h"

namespace tfdist::device {

inline bool HasGivenUp(const Waiting& waiting) { return LoadWord(waiting.ended) != 0; }

inline void GiveUp(const Waiting& waiting, Outcome outcome) {
  StoreWord(waiting.outcome, static_cast<uint64_t>(outcome));
  StoreWord(waiting.ended, 1);
}

// While a thread waits, it mostly reads a word in the memory of its own GPU. It also reads the
// abort flag in host memory, but only once per this number of reads, because host memory is slower.
constexpr uint32_t kLooksForOneAtHost = 64;

// Waits until `*word` is at least `number`, and returns true. If the host aborts or the wait times
// out, stores this outcome and returns false.
inline bool Await(const uint64_t* word, uint64_t number, const Waiting& waiting) {
  const uint64_t start = Nanoseconds();
  for (uint32_t looks = 1; LoadWord(word) < number; ++looks) {
    if (looks % kLooksForOneAtHost != 0) continue;
    if (LoadWord(waiting.abort) != 0) {
      GiveUp(waiting, Outcome::kAborted);
      return false;
    }
    if (Nanoseconds() - start > waiting.nanoseconds) {
      GiveUp(waiting, Outcome::kLate);
      return false;
    }
  }
  return true;
}

inline bool IsOther(const KernelBarrier& barrier, uint32_t rank) {
  return rank < barrier.ranks && rank != barrier.rank;
}

// Tells another rank that this block has arrived at the barrier. When the other rank reads this
// signal, it also sees all earlier writes of this block.
inline void Signal(const KernelBarrier& barrier, uint32_t other) {
  StoreWord(barrier.words[other] + BlockIndex() * kMaxRanks + barrier.rank, barrier.number);
}

// Tells the other ranks that this block has arrived at the barrier, and waits for the block with
// the same index on each of these ranks. Afterwards, these blocks see each other's earlier writes.
// Returns true to all threads of the block if the wait has succeeded, and false after an abort or a
// timeout.
inline bool SyncRanks(const KernelBarrier& barrier, const Waiting& waiting) {
  bool arrived = AllOfBlock(true);
  const uint32_t other = Thread();
  if (IsOther(barrier, other)) {
    Signal(barrier, other);
    const uint64_t* const words = barrier.words[barrier.rank] + BlockIndex() * kMaxRanks;
    arrived = Await(words + other, barrier.number, waiting);
  }
  return AllOfBlock(arrived);
}

}  // namespace tfdist::device
