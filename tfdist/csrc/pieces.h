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
  explicit BasicPieces(std::vector<BasicPiece<Byte>> pieces) : pieces_(std::move(pieces)) {
    for (const auto& piece : pieces_) {
      begins_.push_back(bytes_);
      bytes_ += piece.bytes;
    }
  }
  BasicPieces(Byte* data, size_t bytes)
      : BasicPieces(std::vector<BasicPiece<Byte>>{{data, bytes}}) {}

  size_t bytes() const { return bytes_; }

  // The same buffers, to be read.
  BasicPieces<const Byte> Const() const {
    std::vector<BasicPiece<const Byte>> pieces;
    for (const auto& piece : pieces_) pieces.push_back({piece.data, piece.bytes});
    return BasicPieces<const Byte>(std::move(pieces));
  }

  // Calls `use(data, bytes)` for each stretch of [begin, begin + bytes), in order.
  template <typename Use>
  void ForEach(size_t begin, size_t bytes, Use use) const {
    if (bytes == 0) return;
    size_t i = Find(begin);
    while (bytes > 0) {
      const size_t skipped = begin - begins_[i];
      const size_t length = std::min(bytes, pieces_[i].bytes - skipped);
      if (length > 0) use(pieces_[i].data + skipped, length);
      begin += length;
      bytes -= length;
      ++i;
    }
  }

  // The stretch that begins at `begin`: where it lies, and how long it is at most.
  BasicPiece<Byte> At(size_t begin) const {
    const size_t i = Find(begin);
    const size_t skipped = begin - begins_[i];
    return {pieces_[i].data + skipped, pieces_[i].bytes - skipped};
  }

 private:
  // The last piece that begins at or before `begin` and is not empty there.
  size_t Find(size_t begin) const {
    const auto after = std::upper_bound(begins_.begin(), begins_.end(), begin);
    return static_cast<size_t>(after - begins_.begin()) - 1;
  }

  std::vector<BasicPiece<Byte>> pieces_;
  std::vector<size_t> begins_;
  size_t bytes_ = 0;
};

using Pieces = BasicPieces<char>;
using ConstPieces = BasicPieces<const char>;

}  // namespace tfdist
