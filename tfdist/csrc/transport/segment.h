// The shared memory of the ranks of a host, with futexes to wake them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "error.h"
#include "types.h"

namespace tfdist {

// Lets ranks of one host wait for each other: spin briefly, yield the core, then sleep.
//
// A rank's bell, in shared memory. A rank that makes progress rings the bells of sleeping ranks.
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

  // Args: the number of ranks on this host.
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

// The shared memory of a host's ranks: their progress, and room for data.
//
// Processes share them: a lock would be one of each process.
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

// The progress of one rank of the host. The counts only grow.
struct alignas(128) Progress {
  std::atomic<uint64_t> arrived;    // collectives joined
  std::atomic<uint64_t> published;  // chunks whose parts for other ranks are ready
  std::atomic<uint64_t> reduced;    // chunks whose own part is ready
  std::atomic<uint64_t> finished;   // chunks that are no longer read here
  Bell bell;
};

// A rank's arrival at a collective: its fingerprint, and all of its data if small.
struct alignas(64) Arrival {
  static constexpr size_t kBytes = 2048;
  Fingerprint fingerprint;
  char data[kBytes];
};

// One direction between two ranks, a ring of bytes.
struct alignas(128) Ring {
  std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
};

class Segment {
 public:
  // The number of chunks in flight, and of arrivals kept.
  static constexpr int kSlots = 3;
  static constexpr int kArrivals = 8;

  // The number of words with which GPU streams wait for each other.
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
  Arrival& arrival(int rank, uint64_t sequence) {
    return arrivals_[(sequence % kArrivals) * static_cast<size_t>(ranks_) +
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
  void RingAll();

 private:
  struct alignas(128) Header {
    std::atomic<uint32_t> writing;
    std::atomic<uint32_t> aborted;  // a Code, or zero; written after the following members
    uint32_t event;
    char worker[kLongestName + 1];
    char message[kLongestMessage + 1];
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
  Arrival* arrivals_;
  Ring* rings_;
  char* ring_data_;
  char* rooms_;
  void* stream_words_;
};

}  // namespace tfdist
