// The memory that the ranks of a host share, and futexes to wake sleeping ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "error.h"
#include "types.h"

namespace tfdist {

// The event on which a rank sleeps, in shared memory. A rank that makes progress signals the events
// of the sleeping ranks.
struct alignas(64) FutexEvent {
  std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> signals;

  void Signal();
  // Sleeps until the number of signals differs from `seen`, or until a short time has passed.
  void Sleep(uint32_t seen);
};

// How many rounds a waiting rank spins, and how many rounds it then yields its core, before it
// sleeps. The numbers depend on whether the host has a core for every rank.
struct SpinPolicy {
  int spins;
  int yields;

  // Args: ranks: the number of ranks on this host.
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

// Waits until `ready()` returns true: first spins, then yields the core, and then sleeps.
// Args: mine: the event on which the waiting rank sleeps.
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

// These atomics are shared between processes. They must be lock-free, since locks would be local to
// a process.
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

// The progress of one rank of the host. All counters only grow.
struct alignas(128) Progress {
  std::atomic<uint64_t> arrived;    // number of collectives that the rank has joined
  std::atomic<uint64_t> published;  // number of chunks with data for the other ranks
  std::atomic<uint64_t> reduced;    // number of chunks with the result of the rank's part
  std::atomic<uint64_t> finished;   // number of chunks that the rank no longer reads
  FutexEvent event;
};

// The memory that a rank writes when it joins a collective: its fingerprint, and its data if they
// fit.
struct alignas(64) EagerSlot {
  static constexpr size_t kBytes = 2048;
  Fingerprint fingerprint;
  char data[kBytes];
};

// The counters of a ring buffer, through which one rank sends bytes to another rank.
struct alignas(128) Ring {
  std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
};

// The memory that the ranks of a host share: the progress of each rank, and memory for data.
class Segment {
 public:
  // The maximum number of chunks in flight, and the number of eager slots of each rank.
  static constexpr int kSlots = 3;
  static constexpr int kEagerSlots = 8;

  // The size of the words for which GPU streams wait (`device/stream_waits.h`).
  static constexpr size_t kStreamWordBytes = size_t{64} << 10;

  static size_t BytesFor(int ranks);

  // Maps the file `descriptor`, which has `bytes` zero bytes, and closes the descriptor.
  Segment(int descriptor, size_t bytes, int ranks);
  // Uses memory of the caller. This is for ranks that are threads of one process. The memory must
  // be filled with zeros.
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

  // The maximum size of a chunk, and the memory for the chunks of each rank, which is called its
  // room. A room can hold one more chunk than the maximum number in flight, because a chunk that
  // does not fit at the end of the room begins at the front.
  size_t chunk_bytes() const { return chunk_bytes_; }
  size_t room_bytes() const { return (kSlots + 1) * chunk_bytes_; }
  char* room(int rank) { return rooms_ + static_cast<size_t>(rank) * room_bytes(); }

  size_t ring_bytes() const { return ring_bytes_; }
  Ring& ring(int from, int to) { return rings_[from * ranks_ + to]; }
  char* ring_data(int from, int to) {
    return ring_data_ + static_cast<size_t>(from * ranks_ + to) * ring_bytes_;
  }

  void* stream_words() { return stream_words_; }

  // Makes every rank of the host abort. If the segment already contains an error, that error is
  // kept.
  void Abort(const Error& error);
  bool aborted() const { return header_->aborted.load(std::memory_order_acquire) != 0; }
  Error abort_error() const;
  // Wakes all sleeping ranks of the host.
  void WakeAll();

 private:
  struct alignas(128) Header {
    std::atomic<uint32_t> writing;
    std::atomic<uint32_t> aborted;  // a Code, or 0; stored after the following members
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
