#include "transport/host.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "error.h"
#include "memory.h"

namespace tfdist {
namespace {

// A rank that makes progress first stores its progress, and then reads `asleep` to find out whether
// it must wake another rank. A rank that goes to sleep first stores `asleep`, and then reads the
// progress. With sequential consistency, at least one of the two ranks sees the store of the other.
// With a weaker order, both could miss it, and the second rank would not be woken.
constexpr auto kInOrder = std::memory_order_seq_cst;

// The time to read data of other cores is measured only in every kMeasured-th collective, because a
// measurement stalls the CPU.
constexpr uint64_t kMeasured = 8;

}  // namespace

Host::Host(std::unique_ptr<Segment> segment, int rank, std::vector<int> group_ranks,
           std::vector<std::string> names, Guard& guard, Recorder& recorder)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(static_cast<int>(names.size())),
      group_ranks_(std::move(group_ranks)),
      names_(std::move(names)),
      guard_(guard),
      recorder_(recorder),
      spin_policy_(SpinPolicy::For(size_)),
      awaited_(static_cast<size_t>(size_), 0) {}

void Host::Arrive(const Fingerprint& fingerprint, const ConstBufferList& data) {
  joined_ = fingerprint;
  ++collectives_;
  if (size_ == 1) return;
  EagerSlot& slot = segment_->slot(rank_, collectives_);
  slot.fingerprint = fingerprint;
  copied_bytes.store(copied_bytes.load(std::memory_order_relaxed) + data.bytes(),
                     std::memory_order_relaxed);
  char* to = slot.data;
  data.ForEach(0, data.bytes(), [&to](const char* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  });
  mine().arrived.store(collectives_, kInOrder);
  Wake();
}

const EagerSlot& Host::Await(int rank) {
  const auto& arrived = segment_->progress(rank).arrived;
  const bool waits = arrived.load(kInOrder) < collectives_;
  if (waits) Wait([&] { return arrived.load(kInOrder) >= collectives_; });
  if (rank != rank_) recorder_.Arrived(group_ranks_[static_cast<size_t>(rank)], waits);
  const EagerSlot& slot = segment_->slot(rank, collectives_);
  // Measures only the first read of the slot, which fetches the data from the other core. A second
  // read would hit this core's own cache.
  uint64_t& awaited = awaited_[static_cast<size_t>(rank)];
  if (rank != rank_ && collectives_ % kMeasured == 0 && awaited != collectives_) {
    // Limits the result, because an interrupt during the measurement could make it very large.
    const unsigned long ticks = std::min(TicksToRead(&slot), 4 * kFarTicks);
    ticks_ = (3 * ticks_ + ticks) / 4;
  }
  awaited = collectives_;
  // Copies the fingerprint before it is checked, because the other rank can change its memory at
  // any time.
  const Fingerprint theirs = slot.fingerprint;
  if (rank != rank_ && !Agree(joined_, theirs)) {
    throw Disagreement(names_[static_cast<size_t>(rank_)], joined_,
                       names_[static_cast<size_t>(rank)], theirs);
  }
  return slot;
}

void Host::AwaitAll() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) Await(rank);
  }
}

void Host::Copy(void* to, const void* from, size_t bytes) {
  // `ticks_` is measured repeatedly, so the choice may change: the CPUs of a virtual machine may
  // migrate between cores.
  if (ticks_ > kFarTicks) {
    CopyFar(to, from, bytes);
  } else {
    CopyNear(to, from, bytes);
  }
}

uint64_t Host::TakeChunks(uint64_t count) {
  const uint64_t first = chunks_ + 1;
  chunks_ += count;
  return first;
}

size_t Host::TakeRoom(uint64_t chunk, size_t bytes) {
  // Uses the room as a ring buffer, so that much time passes before a cache line is overwritten. By
  // then, the caches of other cores no longer hold the line, so the store does not have to fetch it
  // from them.
  if (room_next_ + bytes > segment_->room_bytes()) room_next_ = 0;
  const size_t begin = room_next_;
  room_next_ += bytes;
  if (chunk <= Segment::kSlots) return begin;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const auto& finished = segment_->progress(rank).finished;
    Wait([&] { return finished.load(kInOrder) + Segment::kSlots >= chunk; });
  }
  return begin;
}

void Host::Publish(uint64_t chunk) {
  mine().published.store(chunk, kInOrder);
  Wake();
}

void Host::AwaitPublished(int rank, uint64_t chunk) {
  const auto& published = segment_->progress(rank).published;
  Wait([&] { return published.load(kInOrder) >= chunk; });
}

void Host::Reduced(uint64_t chunk) {
  mine().reduced.store(chunk, kInOrder);
  Wake();
}

void Host::AwaitReduced(int rank, uint64_t chunk) {
  const auto& reduced = segment_->progress(rank).reduced;
  Wait([&] { return reduced.load(kInOrder) >= chunk; });
}

void Host::Finish(uint64_t chunk) {
  mine().finished.store(chunk, kInOrder);
  Wake();
}

void Host::Wake() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) Wake(rank);
  }
}

void Host::Wake(int rank) {
  FutexEvent& event = segment_->progress(rank).event;
  if (event.asleep.load(kInOrder)) event.Signal();
}

}  // namespace tfdist
