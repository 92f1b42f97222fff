// A rank's access to the memory that the ranks of its host share: eager slots, chunks and rings.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control/flight_log.h"
#include "error.h"
#include "memory.h"
#include "transport/segment.h"
#include "types.h"

namespace tfdist {

class Host {
 public:
  // Args: segment: the shared memory, or null if no other rank is on this host; rank: this rank's
  // position on the host; group_ranks: for each position on the host, the rank in the group; names:
  // for each position, the rank's name in messages; guard: ends waits early; recorder: records when
  // other ranks arrive.
  Host(std::unique_ptr<Segment> segment, int rank, std::vector<int> group_ranks,
       std::vector<std::string> names, Guard& guard, Recorder& recorder);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool has_segment() const { return segment_ != nullptr; }
  Segment& segment() { return *segment_; }
  Guard& guard() { return guard_; }

  // Announces that this rank has joined a collective, and publishes up to EagerSlot::kBytes of
  // data.
  void Arrive(const Fingerprint& fingerprint, const ConstBufferList& data = {});

  // Waits until the rank at position `rank` has joined this rank's current collective, and returns
  // that rank's eager slot. Throws the error of `Disagreement` if that rank has joined another
  // collective.
  const EagerSlot& Await(int rank);
  void AwaitAll();

  // Copies data into the shared memory, in the way that lets the other ranks read them fastest.
  void Copy(void* to, const void* from, size_t bytes);

  // Takes the numbers of `count` chunks for a transfer, and returns the first number. All ranks of
  // the host take the same number of chunks.
  uint64_t TakeChunks(uint64_t count);
  // Waits until a chunk may be written, and returns the chunk's offset in the room of every rank.
  // All ranks of the host take the same chunks with the same sizes in the same order. The maximum
  // size of a chunk is chunk_bytes().
  size_t TakeRoom(uint64_t chunk, size_t bytes);
  void Publish(uint64_t chunk);
  void AwaitPublished(int rank, uint64_t chunk);
  void Reduced(uint64_t chunk);
  void AwaitReduced(int rank, uint64_t chunk);
  void Finish(uint64_t chunk);

  // Wakes the sleeping ranks of the host. Called after each progress for which another rank may
  // wait.
  void Wake();
  void Wake(int rank);
  FutexEvent& event() { return segment_->progress(rank_).event; }
  const SpinPolicy& spin_policy() const { return spin_policy_; }

  std::atomic<uint64_t> copied_bytes{0};  // number of bytes copied into the shared memory

 private:
  Progress& mine() { return segment_->progress(rank_); }
  template <typename Ready>
  void Wait(Ready ready) {
    guard_.NoteProgress();
    WaitUntil(ready, event(), spin_policy_, guard_);
  }

  std::unique_ptr<Segment> segment_;
  const int rank_;
  const int size_;
  const std::vector<int> group_ranks_;
  const std::vector<std::string> names_;
  Guard& guard_;
  Recorder& recorder_;
  const SpinPolicy spin_policy_;
  // For each rank, the number of the last collective in which this rank read that rank's eager
  // slot.
  std::vector<uint64_t> awaited_;
  Fingerprint joined_;
  uint64_t collectives_ = 0;  // number of collectives joined so far
  uint64_t chunks_ = 0;       // number of chunks taken so far; the first chunk is number 1
  size_t room_next_ = 0;
  // The running mean of the number of clock ticks that it takes to read another rank's data.
  unsigned long ticks_ = 0;
};

}  // namespace tfdist
