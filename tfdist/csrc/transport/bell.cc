#include "transport/bell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <thread>

namespace tfdist {
namespace {

// Nobody is woken by a rank that died, so a sleeper looks around by itself now and then.
constexpr long kNapNanoseconds = 20'000'000;

long Futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                 0);
}

}  // namespace

void Bell::Ring() {
  rings.fetch_add(1, std::memory_order_seq_cst);
  Futex(&rings, FUTEX_WAKE, 1, nullptr);
}

void Bell::Sleep(uint32_t seen) {
  const timespec nap{0, kNapNanoseconds};
  Futex(&rings, FUTEX_WAIT, seen, &nap);
}

Patience Patience::For(int ranks) {
  static const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (ranks <= cores) return {2000, 20};
  // Somebody who has no core must run first.
  return {0, 60};
}

void GiveCoreAway() { sched_yield(); }

}  // namespace tfdist
