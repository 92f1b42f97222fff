#include "collective/coder.h"

#include <algorithm>
#include <cstring>

namespace tfdist {
namespace {

constexpr size_t kFloat = sizeof(float);
constexpr size_t kChunkValues = 64 << 10;

bool AreVotes(const Codec& codec) { return codec.encoding == Encoding::kSigns && codec.unit; }

// A vote can end in a tie, and kSigns has no code for 0. The results of votes are therefore encoded
// with kLevels, as -1, 0 or 1.
Codec ForSums(Codec codec) {
  if (AreVotes(codec)) {
    codec.encoding = Encoding::kLevels;
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

size_t CodedTransfer::BufferBytes() const {
  size_t bytes = static_cast<size_t>(members()) * EncodedBytes(codec(), Count(me()));
  for (int j = 0; j < members(); ++j) {
    bytes += EncodedBytes(codec(), Count(j)) + EncodedBytes(sums_codec(), Count(j));
  }
  return bytes;
}

size_t CodedTransfer::ErrorBegin(int j) const { return error_begin_ + transfer_.Begin(j); }

namespace {

template <typename Bytes>
void CopyFrom(const Bytes& buffers, size_t begin, size_t count, float* values) {
  char* to = reinterpret_cast<char*>(values);
  buffers.ForEach(begin, count * kFloat, [&to](const char* from, size_t some) {
    std::memcpy(to, from, some);
    to += some;
  });
}

void CopyTo(const BufferList& buffers, size_t begin, size_t count, const float* values) {
  const char* from = reinterpret_cast<const char*>(values);
  buffers.ForEach(begin, count * kFloat, [&from](char* to, size_t some) {
    std::memcpy(to, from, some);
    from += some;
  });
}

}  // namespace

uint8_t* HostCoder::Begin(const CodedTransfer& transfer) {
  t_ = &transfer;
  const size_t chunk = transfer.chunk();
  values_ = reinterpret_cast<float*>(scratch_.Take(2 * chunk * kFloat + transfer.BufferBytes()));
  errors_ = values_ + chunk;
  return reinterpret_cast<uint8_t*>(errors_ + chunk);
}

void HostCoder::EncodeBatch(int j, const Batch& batch) {
  CopyFrom(t_->in(), t_->InBegin(j) + batch.begin * kFloat, batch.count, values_);
  EncodeValues(t_->codec(), j, batch, CodedTransfer::Stage::kValues);
}

void HostCoder::AddUp(const Batch& sums, const Arrived& arrived) {
  const Codec& codec = t_->codec();
  std::fill_n(values_, sums.count, 0.0f);
  for (int j = 0; j < t_->members(); ++j) {
    uint8_t* const encoded =
        arrived.encoded + static_cast<size_t>(j) * arrived.stride + EncodedBytes(codec, sums.begin);
    if (j != t_->me()) {
      Decode(codec, {encoded, sums.count, values_, true});
      continue;
    }
    CopyFrom(t_->in(), t_->InBegin(j) + sums.begin * kFloat, sums.count, errors_);
    if (t_->votes()) {
      Encode(codec, {errors_, nullptr, sums.count, encoded, 0});
      Decode(codec, {encoded, sums.count, errors_, false});
    }
    for (size_t i = 0; i < sums.count; ++i) values_[i] += errors_[i];
  }
  if (t_->votes()) {
    for (size_t i = 0; i < sums.count; ++i) {
      // NaN stays NaN.
      values_[i] = values_[i] > 0 ? 1.0f : values_[i] < 0 ? -1.0f : values_[i];
    }
  }
  EncodeValues(t_->sums_codec(), t_->me(), sums, CodedTransfer::Stage::kSums);
  DecodeBatch(t_->me(), sums);
}

void HostCoder::EncodeValues(const Codec& codec, int j, const Batch& batch,
                             CodedTransfer::Stage stage) {
  const uint32_t seed = t_->Seed(stage, t_->Position(j) + batch.begin);
  const size_t error_at = t_->ErrorBegin(j) + batch.begin * kFloat;
  const bool feeds_back = t_->error().bytes() > 0;
  if (feeds_back) CopyFrom(t_->error(), error_at, batch.count, errors_);
  Encode(codec, {values_, feeds_back ? errors_ : nullptr, batch.count, batch.encoded, seed});
  if (feeds_back) CopyTo(t_->error(), error_at, batch.count, errors_);
}

void HostCoder::DecodeBatch(int j, const Batch& sums) {
  Decode(t_->sums_codec(), {sums.encoded, sums.count, values_, false});
  CopyTo(t_->out(), t_->OutBegin(j) + sums.begin * kFloat, sums.count, values_);
}

}  // namespace tfdist
