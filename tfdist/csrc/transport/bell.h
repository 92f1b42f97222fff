// Lets ranks of one host wait for each other: spin briefly, give the core away, then sleep.
#pragma once

#include <atomic>
#include <cstdint>

#include "guard.h"

namespace tfdist {

// A rank's bell, in shared memory. Whoever has made progress rings the bells of those asleep.
struct alignas(64) Bell {
  std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> rings;

  void Ring();
  // Sleeps until the bell has rung since `seen`, or for a moment.
  void Sleep(uint32_t seen);
};

// How long to spin before sleeping, in rounds; depends on whether every rank has a core.
struct Patience {
  int spins;
  int yields;

  // For so many ranks on this host.
  static Patience For(int ranks);
};

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void GiveCoreAway();

// Waits until `ready()`; `mine` is the bell of the rank that waits.
template <typename Ready>
void WaitUntil(Ready ready, Bell& mine, const Patience& patience, Guard& guard) {
  for (int i = 0; i < patience.spins; ++i) {
    if (ready()) return;
    Pause();
  }
  for (int i = 0; i < patience.yields; ++i) {
    if (ready()) return;
    GiveCoreAway();
  }
  while (!ready()) {
    guard.Check();
    mine.asleep.store(1, std::memory_order_seq_cst);
    const uint32_t seen = mine.rings.load(std::memory_order_seq_cst);
    if (!ready()) mine.Sleep(seen);
    mine.asleep.store(0, std::memory_order_relaxed);
  }
}

}  // namespace tfdist
