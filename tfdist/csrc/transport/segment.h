// The shared memory of the ranks of a host, with futexes to wake them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "error.h"
#include "types.h"

namespace tfdist {

// A rank's futex event, in shared memory. A rank that makes progress signals the events of sleeping
// ranks.
struct alignas(64) FutexEvent {
  std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> signals;

  void Signal();
  // Sleeps until the event has been signaled since `seen`, at most briefly.
  void Sleep(uint32_t seen);
};

// The numbers of rounds to spin and to yield before sleeping; they depend on whether every rank has
// a core.
struct SpinPolicy {
  int spins;
  int yields;

  // Args: the number of ranks on this host.
  static SpinPolicy For(int ranks);
};

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void GiveCoreAway();

// Waits until `ready()`: spins briefly, yields the core, then sleeps. Args: mine: the event of the
// waiting rank.
template <typename Ready>
void WaitUntil(Ready ready, FutexEvent& mine, const SpinPolicy& spin_policy, Guard& guard) {
  for (int i = 0; i < spin_policy.spins; ++i) {
    if (ready()) return;
    Pause();
  }
  for (int i = 0; i < spin_policy.yields; ++i) {
    if (ready()) return;
    GiveCoreAway();
  }
  while (!ready()) {
    guard.Check();
    mine.asleep.store(1, std::memory_order_seq_cst);
    const uint32_t seen = mine.signals.load(std::memory_order_seq_cst);
    if (!ready()) mine.Sleep(seen);
    mine.asleep.store(0, std::memory_order_relaxed);
  }
}

// The atomics are shared between processes, so they must not use process-local locks.
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

// The progress of one rank of the host. The counts only grow.
struct alignas(128) Progress {
  std::atomic<uint64_t> arrived;    // collectives joined
  std::atomic<uint64_t> published;  // chunks with ready parts for other ranks
  std::atomic<uint64_t> reduced;    // chunks with a ready part of this rank
  std::atomic<uint64_t> finished;   // chunks that are no longer read here
  FutexEvent event;
};

// A rank's eager slot for a collective: its fingerprint, and all of its data if small.
struct alignas(64) EagerSlot {
  static constexpr size_t kBytes = 2048;
  Fingerprint fingerprint;
  char data[kBytes];
};

// A ring of bytes from one rank to another.
struct alignas(128) Ring {
  std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
};

// The shared memory of a host's ranks: their progress, and room for data.
class Segment {
 public:
  // The maximum number of chunks in flight, and of eager slots per rank.
  static constexpr int kSlots = 3;
  static constexpr int kEagerSlots = 8;

  // The bytes of the words that GPU streams wait for.
  static constexpr size_t kStreamWordBytes = size_t{64} << 10;

  static size_t BytesFor(int ranks);

  // Maps a descriptor of `bytes` zero bytes, and closes it.
  Segment(int descriptor, size_t bytes, int ranks);
  // Uses the caller's memory, for ranks that are threads; it must be zero-filled.
  Segment(void* memory, size_t bytes, int ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int ranks() const { return ranks_; }
  Progress& progress(int rank) { return progress_[rank]; }
  EagerSlot& slot(int rank, uint64_t sequence) {
    return eager_slots_[(sequence % kEagerSlots) * static_cast<size_t>(ranks_) +
                        static_cast<size_t>(rank)];
  }

  // A rank's room for chunks, and the maximum chunk size. There is room for one more chunk than are
  // in flight, since a chunk that does not fit at the end begins at the front.
  size_t chunk_bytes() const { return chunk_bytes_; }
  size_t room_bytes() const { return (kSlots + 1) * chunk_bytes_; }
  char* room(int rank) { return rooms_ + static_cast<size_t>(rank) * room_bytes(); }

  size_t ring_bytes() const { return ring_bytes_; }
  Ring& ring(int from, int to) { return rings_[from * ranks_ + to]; }
  char* ring_data(int from, int to) {
    return ring_data_ + static_cast<size_t>(from * ranks_ + to) * ring_bytes_;
  }

  void* stream_words() { return stream_words_; }

  // Makes every rank of the host abort; the first error is kept.
  void Abort(const Error& error);
  bool aborted() const { return header_->aborted.load(std::memory_order_acquire) != 0; }
  Error abort_error() const;
  // Wakes sleeping ranks.
  void WakeAll();

 private:
  struct alignas(128) Header {
    std::atomic<uint32_t> writing;
    std::atomic<uint32_t> aborted;  // a Code, or zero; written after the following members
    uint32_t event;
    char worker[kMaxNameBytes + 1];
    char message[kMaxMessageBytes + 1];
  };

  void Lay();

  void* memory_;
  size_t bytes_;
  int ranks_;
  bool mapped_;
  size_t chunk_bytes_;
  size_t ring_bytes_;
  Header* header_;
  Progress* progress_;
  EagerSlot* eager_slots_;
  Ring* rings_;
  char* ring_data_;
  char* rooms_;
  void* stream_words_;
};

}  // namespace tfdist
