// A rank among the ranks of its host: eager slots, chunks and rings in their shared segment.
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
  // Args: the segment (null for a rank alone on its host), this rank's position on the host, the
  // positions' ranks in the group and their names for messages, a guard that ends waits early, and
  // a recorder of arrivals.
  Host(std::unique_ptr<Segment> segment, int rank, std::vector<int> group_ranks,
       std::vector<std::string> names, Guard& guard, Recorder& recorder);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool has_segment() const { return segment_ != nullptr; }
  Segment& segment() { return *segment_; }
  Guard& guard() { return guard_; }

  // Announces that this rank has joined a collective, with up to EagerSlot::kBytes of data.
  void Arrive(const Fingerprint& fingerprint, const ConstBufferList& data = {});

  // Waits for a rank to join this rank's current collective, and returns its eager slot. Throws
  // Disagreement if the rank has joined another collective.
  const EagerSlot& Await(int rank);
  void AwaitAll();

  // Copies into the segment so that the other ranks can read the data fastest.
  void Copy(void* to, const void* from, size_t bytes);

  // The chunks of one transfer; all ranks of the host take the same number.
  uint64_t TakeChunks(uint64_t count);
  // Waits until a chunk may be written, and returns its offset in each rank's room. All ranks of
  // the host take the same chunks with the same size, at most chunk_bytes(), in order.
  size_t TakeRoom(uint64_t chunk, size_t bytes);
  void Publish(uint64_t chunk);
  void AwaitPublished(int rank, uint64_t chunk);
  void Reduced(uint64_t chunk);
  void AwaitReduced(int rank, uint64_t chunk);
  void Finish(uint64_t chunk);

  // Wakes sleeping ranks; called after each progress that another rank may wait for.
  void Wake();
  void Wake(int rank);
  FutexEvent& event() { return segment_->progress(rank_).event; }
  const SpinPolicy& spin_policy() const { return spin_policy_; }

  std::atomic<uint64_t> copied_bytes{0};  // copied into the segment

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
  std::vector<uint64_t> awaited_;  // per rank, the last collective with an eager slot that was read
  Fingerprint joined_;
  uint64_t collectives_ = 0;  // joined so far
  uint64_t chunks_ = 0;       // number of chunks taken so far; the first chunk is number 1
  size_t room_next_ = 0;
  unsigned long ticks_ = 0;  // running mean of the time to read another rank's data
};

}  // namespace tfdist
