#include "collective/coder.h"

namespace tfdist {
namespace {

constexpr size_t kFloat = sizeof(float);
constexpr size_t kChunkValues = 64 << 10;

bool AreVotes(const Codec& codec) { return codec.form == Form::kSigns && codec.unit; }

// A majority of signs may be a tie, which has no sign.
Codec ForSums(Codec codec) {
  if (AreVotes(codec)) {
    codec.form = Form::kLevels;
    codec.bits = 2;
    codec.stochastic = codec.euclidean = false;
    codec.clip = 0;
  }
  return codec;
}

}  // namespace

CodedTransfer::CodedTransfer(const Transfer& transfer, const Members& members,
                             const Compression& compression, size_t error_begin)
    : transfer_(transfer),
      members_(members),
      compression_(compression),
      error_begin_(error_begin),
      sums_codec_(ForSums(compression.codec)),
      chunk_(kChunkValues / compression.codec.block * compression.codec.block),
      seed_(compression.seed +
            static_cast<uint32_t>(members.ranks[static_cast<size_t>(members.me)]) * 0x9e3779b9u) {}

bool CodedTransfer::votes() const { return AreVotes(codec()); }

size_t CodedTransfer::Count(int j) const {
  return transfer_.part_bytes[static_cast<size_t>(j)] / kFloat;
}

size_t CodedTransfer::Position(int j) const { return transfer_.Begin(j) / kFloat; }

size_t CodedTransfer::EncodedBytes() const {
  size_t bytes = static_cast<size_t>(members()) * tfdist::EncodedBytes(codec(), Count(me()));
  for (int j = 0; j < members(); ++j) {
    bytes += tfdist::EncodedBytes(codec(), Count(j)) + tfdist::EncodedBytes(sums_codec(), Count(j));
  }
  return bytes;
}

size_t CodedTransfer::ErrorBegin(int j) const { return error_begin_ + transfer_.Begin(j); }

}  // namespace tfdist
