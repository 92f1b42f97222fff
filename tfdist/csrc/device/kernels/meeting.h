// How kernels wait for those of other ranks.
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

// To look at the host's memory takes longer than to look at the GPU's own.
constexpr uint32_t kLooksForOneAtHost = 64;

// Waits until a word has reached a number.
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

inline bool IsOther(const Meeting& meeting, uint32_t rank) {
  return rank < meeting.ranks && rank != meeting.rank;
}

// Tells another rank that this block has come so far. What it has written before is then seen
// there.
inline void Tell(const Meeting& meeting, uint32_t other) {
  StoreWord(meeting.words[other] + BlockIndex() * kMostRanks + meeting.rank, meeting.number);
}

// Tells the other ranks that this block has come so far, and waits for the same block of theirs.
// What each has written before is then seen by all. False if it has given up; the whole block
// knows.
inline bool Meet(const Meeting& meeting, const Waiting& waiting) {
  bool met = AllOfBlock(true);
  const uint32_t other = Thread();
  if (IsOther(meeting, other)) {
    Tell(meeting, other);
    const uint64_t* const words = meeting.words[meeting.rank] + BlockIndex() * kMostRanks;
    met = Await(words + other, meeting.number, waiting);
  }
  return AllOfBlock(met);
}

}  // namespace tfdist::device
