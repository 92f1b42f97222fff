// The memory that the ranks of a host share, and futexes to wake sleeping ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "error.h"
#include "types.h"

namespace tfdist {

// An event in shared memory on which one rank of the host sleeps. When another rank makes progress,
// it signals the event to wake the rank.
struct alignas(64) FutexEvent {
  std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> signals;

  void Signal();
  // Sleeps until the number of signals is no longer equal to `seen`, or until a short time has
  // passed.
  void Sleep(uint32_t seen);
};

// Determines how a rank waits. It spins for `spins` rounds, then yields its core for `yields`
// rounds, and then sleeps. The numbers of rounds depend on whether the host has a core for every
// rank.
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

// Waits until `ready()` returns true. The waiting rank first spins, then yields its core, and then
// sleeps. While it sleeps, `guard` can end the wait with an exception.
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

// Several processes share these atomics. The atomics must be lock-free, since a lock would only
// exist in one process.
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

// The progress of one rank of the host. The counters never decrease.
struct alignas(128) Progress {
  std::atomic<uint64_t> arrived;  // the number of collectives that the rank has joined
  // The number of chunks that contain the rank's data for the other ranks.
  std::atomic<uint64_t> published;
  // The number of chunks that contain the result of the rank's part.
  std::atomic<uint64_t> reduced;
  // The number of chunks that the rank has finished reading in the other ranks' rooms.
  std::atomic<uint64_t> finished;
  FutexEvent event;
};

// The slot in which a rank announces that it has joined a collective. The slot contains the rank's
// fingerprint of the collective, and the rank's data if the data is small enough.
struct alignas(64) EagerSlot {
  static constexpr size_t kBytes = 2048;
  Fingerprint fingerprint;
  char data[kBytes];
};

// The counters of a ring buffer, through which one rank sends bytes to another rank. They are the
// numbers of bytes written and read so far.
struct alignas(128) Ring {
  std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
};

// The memory that the ranks of a host share. It contains the progress of each rank, and buffers for
// data.
class Segment {
 public:
  // kSlots is the maximum number of chunks that are in use at the same time. kEagerSlots is the
  // number of eager slots of each rank.
  static constexpr int kSlots = 3;
  static constexpr int kEagerSlots = 8;

  // The size of the memory for words on which GPU streams wait (device/stream_waits.h).
  static constexpr size_t kStreamWordBytes = size_t{64} << 10;

  static size_t BytesFor(int ranks);

  // Maps the file with this descriptor, and closes the descriptor. The file must contain `bytes`
  // zero bytes.
  Segment(int descriptor, size_t bytes, int ranks);
  // Uses the caller's memory, which must be filled with zeros. This constructor is for ranks that
  // are threads of one process.
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

  // `chunk_bytes` returns the maximum size of a chunk. `room` returns a rank's room, which is the
  // memory for the rank's chunks. A room has space for kSlots + 1 chunks, although only kSlots
  // chunks are in use at the same time. The additional space is needed because a chunk that does
  // not fit at the end of the room is stored at the beginning instead.
  size_t chunk_bytes() const { return chunk_bytes_; }
  size_t room_bytes() const { return (kSlots + 1) * chunk_bytes_; }
  char* room(int rank) { return rooms_ + static_cast<size_t>(rank) * room_bytes(); }

  size_t ring_bytes() const { return ring_bytes_; }
  Ring& ring(int from, int to) { return rings_[from * ranks_ + to]; }
  char* ring_data(int from, int to) {
    return ring_data_ + static_cast<size_t>(from * ranks_ + to) * ring_bytes_;
  }

  void* stream_words() { return stream_words_; }

  // Aborts all ranks of the host, and wakes the ranks that sleep. If the segment already contains
  // an error, the earlier error is kept.
  void Abort(const Error& error);
  bool aborted() const { return header_->aborted.load(std::memory_order_acquire) != 0; }
  Error abort_error() const;
  // Wakes all sleeping ranks of the host.
  void WakeAll();

 private:
  struct alignas(128) Header {
    std::atomic<uint32_t> writing;
    // The Code of the error, or 0 if there is none. It is stored after the members below.
    std::atomic<uint32_t> aborted;
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
