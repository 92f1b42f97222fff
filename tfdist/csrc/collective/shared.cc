// Each rank copies into its room of the segment only what others will read: the values of their
// parts when scattering, its own result when gathering. A reduced part goes to the caller's memory
// and into the segment in one pass. Chunks overlap: while a rank waits for the others to publish
// one, its next one lies there already.

#include "collective/shared.h"

#include <algorithm>
#include <cstring>


namespace tfdist {
namespace {

// Below this a part of a chunk is not worth a wait of its own.
constexpr size_t kLeastSlice = 8 << 10;
// A message is cut into about this many chunks, if that leaves them large enough, so that copying
// and reducing overlap.
constexpr size_t kChunks = 4;

class Run {
 public:
  Run(Host& host, const Transfer& transfer)
      : host_(host), t_(transfer), rank_(host.rank()), ranks_(host.size()) {
    const size_t largest = *std::max_element(t_.part_bytes.begin(), t_.part_bytes.end());
    const size_t room = host.segment().chunk_bytes() / static_cast<size_t>(ranks_) / 64 * 64;
    slice_ = std::max(kLeastSlice, (largest / kChunks + 63) / 64 * 64);
    slice_ = std::min(room, slice_);
    count_ = std::max<size_t>(1, (largest + slice_ - 1) / slice_);
  }

  void operator()() {
    const uint64_t first = host_.TakeChunks(count_);
    Publish(first, 0);
    for (size_t i = 0; i < count_; ++i) {
      if (i + 1 < count_) Publish(first + i + 1, i + 1);
      if (t_.scatter) ReduceOwn(first + i, i);
      // One step behind, so that the others have had time to reduce.
      if (i > 0) Collect(first + i - 1, i - 1);
    }
    Collect(first + count_ - 1, count_ - 1);
  }

 private:
  // The stretch of rank j's part that lies in the i-th chunk.
  size_t Begin(size_t i) const { return i * slice_; }
  size_t Length(int j, size_t i) const {
    const size_t bytes = t_.part_bytes[static_cast<size_t>(j)];
    return Begin(i) < bytes ? std::min(slice_, bytes - Begin(i)) : 0;
  }
  char* Room(int rank, uint64_t chunk, int part) {
    return host_.segment().chunk(rank, chunk) + static_cast<size_t>(part) * slice_;
  }
  void CopyIn(uint64_t chunk, size_t i, int j) {
    char* to = Room(rank_, chunk, j);
    t_.in.ForEach(t_.InBegin(j) + Begin(i), Length(j, i), [&](const char* from, size_t bytes) {
      std::memcpy(to, from, bytes);
      to += bytes;
    });
    host_.copied_bytes += Length(j, i);
  }

  void Publish(uint64_t chunk, size_t i) {
    host_.AwaitRoom(chunk);
    if (t_.scatter) {
      for (int step = 1; step < ranks_; ++step) CopyIn(chunk, i, (rank_ + step) % ranks_);
      host_.Publish(chunk);
      return;
    }
    CopyIn(chunk, i, rank_);
    CopyPart(t_, rank_, Begin(i), Length(rank_, i));
    host_.Publish(chunk);
    host_.Reduced(chunk);
  }

  void ReduceOwn(uint64_t chunk, size_t i) {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_) continue;
      if (i == 0) host_.Await(rank);
      host_.AwaitPublished(rank, chunk);
    }
    std::vector<const char*> rooms(static_cast<size_t>(ranks_), nullptr);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != rank_) rooms[static_cast<size_t>(rank)] = Room(rank, chunk, rank_);
    }
    const size_t length = Length(rank_, i);
    ReducePart(t_, rank_, Begin(i), length, rooms, t_.gather ? Room(rank_, chunk, rank_) : nullptr);
    if (t_.gather) host_.copied_bytes += length;
    host_.Reduced(chunk);
  }

  void Collect(uint64_t chunk, size_t i) {
    for (int step = 1; step < ranks_; ++step) {
      const int j = (rank_ + step) % ranks_;
      if (!t_.scatter && i == 0) host_.Await(j);
      if (!t_.gather) continue;
      host_.AwaitReduced(j, chunk);
      const char* from = Room(j, chunk, j);
      t_.out.ForEach(t_.OutBegin(j) + Begin(i), Length(j, i), [&](char* to, size_t bytes) {
        std::memcpy(to, from, bytes);
        from += bytes;
      });
    }
    host_.Finish(chunk);
  }

  Host& host_;
  const Transfer& t_;
  const int rank_;
  const int ranks_;
  size_t slice_ = 0;
  size_t count_ = 0;
};

}  // namespace

void RunShared(Host& host, const Transfer& transfer) { Run(host, transfer)(); }

}  // namespace tfdist
