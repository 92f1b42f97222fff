// The algorithm of `RunShm`. Each rank owns a region of the segment, called its room. Into its
// room, it copies only the data that other ranks need: when scattering, its values of the other
// ranks' parts, and when gathering, the result of its own part. As soon as a rank has reduced some
// values of its part, it writes the results both to the caller's memory and to its room, while they
// are still in its cache.
//
// Work on successive chunks overlaps: a rank publishes its next chunk before it waits until the
// other ranks have published the current chunk.

#include "collective/algorithms.h"

#include <algorithm>
#include <cstring>

namespace tfdist {
namespace {

constexpr size_t kBlock = 32 << 10;

class Run {
 public:
  Run(Host& host, const Transfer& transfer)
      : host_(host), t_(transfer), rank_(host.rank()), ranks_(host.size()) {
    const size_t largest = *std::max_element(t_.part_bytes.begin(), t_.part_bytes.end());
    const size_t room = host.segment().chunk_bytes() / static_cast<size_t>(ranks_) / 64 * 64;
    count_ = std::max<size_t>(1, (largest + room - 1) / room);
    slice_ = (largest / count_ + 127) / 64 * 64;
    slice_ = std::min(room, slice_);
    count_ = std::max<size_t>(1, (largest + slice_ - 1) / slice_);
  }

  void operator()() {
    const uint64_t first = host_.TakeChunks(count_);
    Publish(first, 0);
    for (size_t i = 0; i < count_; ++i) {
      if (i + 1 < count_) Publish(first + i + 1, i + 1);
      if (t_.scatter) ReduceOwn(first + i, i);
      // The other ranks are probably still reducing the current chunk. Collects the previous chunk,
      // which they have probably finished.
      if (i > 0) Collect(first + i - 1, i - 1);
    }
    Collect(first + count_ - 1, count_ - 1);
  }

 private:
  // Chunk i contains `Length(j, i)` bytes of rank j's part, beginning at the offset `Begin(i)`
  // within the part.
  size_t Begin(size_t i) const { return i * slice_; }
  size_t Length(int j, size_t i) const {
    const size_t bytes = t_.part_bytes[static_cast<size_t>(j)];
    return Begin(i) < bytes ? std::min(slice_, bytes - Begin(i)) : 0;
  }
  char* Room(int rank, uint64_t chunk, int part) {
    return host_.segment().room(rank) + begins_[chunk % Segment::kSlots] +
           static_cast<size_t>(part) * slice_;
  }
  template <typename Source>
  void CopyIn(const Source& source, size_t begin, size_t bytes, char* to) {
    source.ForEach(begin, bytes, [&](const char* from, size_t some) {
      host_.Copy(to, from, some);
      to += some;
    });
    host_.copied_bytes += bytes;
  }

  void CopyPartIn(uint64_t chunk, size_t i, int j) {
    CopyIn(t_.in, t_.InBegin(j) + Begin(i), Length(j, i), Room(rank_, chunk, j));
  }

  void Publish(uint64_t chunk, size_t i) {
    begins_[chunk % Segment::kSlots] = host_.TakeRoom(chunk, slice_ * static_cast<size_t>(ranks_));
    if (t_.scatter) {
      for (int step = 1; step < ranks_; ++step) CopyPartIn(chunk, i, (rank_ + step) % ranks_);
      host_.Publish(chunk);
      return;
    }
    CopyPartIn(chunk, i, rank_);
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
    const size_t length = Length(rank_, i);
    std::vector<const char*> rooms(static_cast<size_t>(ranks_), nullptr);
    // Reduces and copies small blocks in turn, so that a block is still in the L1 cache when it is
    // copied.
    for (size_t done = 0; done < length; done += kBlock) {
      const size_t bytes = std::min(kBlock, length - done);
      for (int rank = 0; rank < ranks_; ++rank) {
        rooms[static_cast<size_t>(rank)] = Room(rank, chunk, rank_) + done;
      }
      ReducePart(t_, rank_, Begin(i) + done, bytes, rooms);
      if (t_.gather) {
        CopyIn(t_.out, t_.OutBegin(rank_) + Begin(i) + done, bytes,
               Room(rank_, chunk, rank_) + done);
      }
    }
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
  // The offset of each of the latest chunks in the ranks' rooms. It is the same in all rooms.
  size_t begins_[Segment::kSlots] = {};
};

}  // namespace

void RunShm(Host& host, const Transfer& transfer) { Run(host, transfer)(); }

}  // namespace tfdist
