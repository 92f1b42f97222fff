// Buffers: aligned memory, scratch space, and lists of memory regions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace tfdist {

// Copies into memory that another core will read.
//
// If another core read a cache line last, an ordinary store first fetches the line from that core.
// Which copy is fastest depends on the caches that the cores share. Measured on one machine between
// two cores, in GB/s of a 1 MiB all-reduce: with a shared cache, ordinary stores 6, CopyNear 19,
// CopyFar 7; without, ordinary stores 1.2, CopyNear 2, CopyFar 8.

// Copies with the processor's string copy, which leaves the data in the caches.
void CopyNear(void* to, const void* from, size_t bytes);

// Copies past the caches, directly into memory.
void CopyFar(void* to, const void* from, size_t bytes);

// Returns the time to read a word written by another core, in clock ticks; zero without such a
// clock. From kFarTicks on, the other core counts as far.
unsigned long TicksToRead(const void* word);
constexpr unsigned long kFarTicks = 250;

// A list of buffers viewed as one contiguous byte range, so that tensors need not be packed.
template <typename Byte>
struct BasicPiece {
  Byte* data;
  size_t bytes;
};

template <typename Byte>
class BasicPieces {
 public:
  BasicPieces() = default;
  explicit BasicPieces(const std::vector<BasicPiece<Byte>>& pieces) {
    pieces_.reserve(pieces.size());
    for (const auto& piece : pieces) Add(piece);
  }
  BasicPieces(Byte* data, size_t bytes) { Add({data, bytes}); }

  size_t bytes() const { return bytes_; }

  // The same buffers, read-only.
  BasicPieces<const Byte> Const() const {
    std::vector<BasicPiece<const Byte>> pieces;
    for (const auto& [piece, begin] : pieces_) pieces.push_back({piece.data, piece.bytes});
    return BasicPieces<const Byte>(pieces);
  }

  // Calls `use(data, bytes)` for each stretch of [begin, begin + bytes), in order.
  template <typename Use>
  void ForEach(size_t begin, size_t bytes, Use use) const {
    if (bytes == 0) return;
    for (auto next = Find(begin); bytes > 0; ++next) {
      const size_t skipped = begin - next->begin;
      const size_t length = std::min(bytes, next->piece.bytes - skipped);
      if (length > 0) use(next->piece.data + skipped, length);
      begin += length;
      bytes -= length;
    }
  }

  // The contiguous bytes that begin at `begin`: their address and maximum length.
  BasicPiece<Byte> At(size_t begin) const {
    const auto found = Find(begin);
    const size_t skipped = begin - found->begin;
    return {found->piece.data + skipped, found->piece.bytes - skipped};
  }

 private:
  struct Placed {
    BasicPiece<Byte> piece;
    size_t begin;
  };

  void Add(const BasicPiece<Byte>& piece) {
    pieces_.push_back({piece, bytes_});
    bytes_ += piece.bytes;
  }

  // The last piece that begins at or before `begin`.
  typename std::vector<Placed>::const_iterator Find(size_t begin) const {
    const auto after =
        std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                         [](size_t at, const Placed& placed) { return at < placed.begin; });
    return after - 1;
  }

  std::vector<Placed> pieces_;
  size_t bytes_ = 0;
};

using Pieces = BasicPieces<char>;
using ConstPieces = BasicPieces<const char>;

// Memory kept between collectives, since fresh pages are slow.
class Scratch {
 public:
  // At least `bytes` uninitialized bytes, valid until the next call.
  char* Take(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(new char[bytes]);
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t bytes_ = 0;
};

}  // namespace tfdist
