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
  // Args:
  //   segment: the shared memory, or null if no other rank is on this host.
  //   rank: the position of this rank on the host.
  //   group_ranks: for each position on the host, the rank in the group.
  //   names: for each position on the host, the rank's name in error messages.
  //   guard: an object that can end waits early.
  //   recorder: the recorder, which is notified when other ranks arrive.
  Host(std::unique_ptr<Segment> segment, int rank, std::vector<int> group_ranks,
       std::vector<std::string> names, Guard& guard, Recorder& recorder);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool has_segment() const { return segment_ != nullptr; }
  Segment& segment() { return *segment_; }
  Guard& guard() { return guard_; }

  // Announces that this rank has joined a collective. Also publishes `data`, which has at most
  // EagerSlot::kBytes bytes, in this rank's eager slot.
  void Arrive(const Fingerprint& fingerprint, const ConstBufferList& data = {});

  // Waits until the rank at position `rank` has joined the same collective as this rank, and
  // returns the eager slot of that rank. If that rank has joined another collective, throws the
  // error that `Disagreement` creates.
  const EagerSlot& Await(int rank);
  void AwaitAll();

  // Copies data into the shared memory. Uses `CopyNear` or `CopyFar`, depending on how long it
  // takes to read data of other ranks.
  void Copy(void* to, const void* from, size_t bytes);

  // Reserves numbers for `count` chunks of a transfer, and returns the first of these consecutive
  // numbers. All ranks of the host must reserve the same number of chunks, so that a chunk has the
  // same number on all ranks.
  uint64_t TakeChunks(uint64_t count);
  // Waits until the memory for a chunk is free, and returns the offset of the chunk in the rooms.
  // The offset is the same in the room of every rank, because all ranks of the host must call this
  // function for the same chunks, with the same sizes, in the same order. A chunk must not be
  // larger than Segment::chunk_bytes().
  size_t TakeRoom(uint64_t chunk, size_t bytes);
  void Publish(uint64_t chunk);
  void AwaitPublished(int rank, uint64_t chunk);
  void Reduced(uint64_t chunk);
  void AwaitReduced(int rank, uint64_t chunk);
  void Finish(uint64_t chunk);

  // Wakes the sleeping ranks of the host. Must be called whenever this rank has made progress for
  // which another rank may be waiting.
  void Wake();
  void Wake(int rank);
  FutexEvent& event() { return segment_->progress(rank_).event; }
  const SpinPolicy& spin_policy() const { return spin_policy_; }

  std::atomic<uint64_t> copied_bytes{0};  // the number of bytes copied into the shared memory

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
  // For each rank, the number of the last collective in which `Await` was called for this rank.
  std::vector<uint64_t> awaited_;
  Fingerprint joined_;
  uint64_t collectives_ = 0;  // the number of collectives joined so far
  uint64_t chunks_ = 0;       // the number of chunks reserved so far; the first chunk is chunk 1
  size_t room_next_ = 0;
  // The time that it takes to read data that another rank has written: a running mean, in clock
  // ticks.
  unsigned long ticks_ = 0;
};

}  // namespace tfdist
