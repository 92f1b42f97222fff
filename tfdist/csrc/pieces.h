// A list of buffers seen as one run of bytes, so that tensors need not be packed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace tfdist {

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

  // The same buffers, to be read.
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

  // The stretch that begins at `begin`: where it lies, and how long it is at most.
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

}  // namespace tfdist
