// Encodes and decodes values on their way, for codecs of the core.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "collective/operation.h"
#include "collective/transfer.h"
#include "memory.h"

namespace tfdist {

// What computes in a compressed all-reduce: the processor, or the GPU whose memory the values are
// in.
//
// A transfer whose values are encoded: which, by whom, and how.
class CodedTransfer {
 public:
  // Args: error_begin: where in the compression's error that of the transfer's first value lies.
  CodedTransfer(const Transfer& transfer, const Members& members, const Compression& compression,
                size_t error_begin);

  const Codec& codec() const { return compression_.codec; }
  const Codec& sums_codec() const { return sums_codec_; }
  // Whether a sum is the sign that most values have.
  bool votes() const;
  int members() const { return static_cast<int>(members_.ranks.size()); }
  int me() const { return members_.me; }

  const ConstPieces& in() const { return transfer_.in; }
  const Pieces& out() const { return transfer_.out; }
  // Of what was not sent so far; empty where nothing is fed back.
  const Pieces& error() const { return compression_.error; }

  // Values of member j's part, and where they begin: among all of the transfer's, and in bytes of
  // `in`, of `out` and of the error.
  size_t Count(int j) const;
  size_t Position(int j) const;
  size_t InBegin(int j) const { return transfer_.InBegin(j); }
  size_t OutBegin(int j) const { return transfer_.OutBegin(j); }
  size_t ErrorBegin(int j) const;

  // Bytes of all that is encoded: what is sent, what everyone sends of the own part, and all sums.
  size_t EncodedBytes() const;

  // So many values, whole blocks, are encoded with one seed: that of the first of them.
  size_t chunk() const { return chunk_; }
  enum class Stage : uint32_t { kValues, kSums };
  uint32_t Seed(Stage stage, size_t position) const {
    return seed_ + static_cast<uint32_t>(position) * kSeedStep + static_cast<uint32_t>(stage);
  }
  static constexpr uint32_t kSeedStep = 0x85ebca6bu;  // from one value to the next

 private:
  const Transfer& transfer_;
  const Members& members_;
  const Compression& compression_;
  const size_t error_begin_;
  const Codec sums_codec_;
  const size_t chunk_;
  const uint32_t seed_;
};

class Coder {
 public:
  // Values [begin, begin + count) of a part, and where they lie when encoded: whole chunks, unless
  // the part ends.
  struct Batch {
    size_t begin;
    size_t count;
    uint8_t* encoded;
    size_t bytes;
  };
  // Everyone's encoded values of the own part, one part behind the other.
  struct Arrived {
    uint8_t* encoded;
    size_t stride;
  };

  virtual ~Coder() = default;

  // Before anything else of a transfer, which stays until its end; returns memory for its encoded
  // bytes.
  virtual uint8_t* Begin(const CodedTransfer& transfer) = 0;
  // Chunks that are encoded, summed or decoded at once.
  virtual size_t ChunksAtOnce() const = 0;

  // Says early which values are to be encoded later.
  virtual void Foresee(int, const Batch&) {}
  // Encodes values of member j's part.
  virtual void Encode(int j, const Batch& batch) = 0;
  // Sums everyone's values of the own part, in the members' order, encodes the sums and decodes
  // them into the result, so that all have the same bits.
  virtual void AddUp(const Batch& sums, const Arrived& arrived) = 0;
  // Before sums are sent.
  virtual void Complete(const Batch&) {}
  // Decodes sums of member j's part into the result.
  virtual void Decode(int j, const Batch& sums) = 0;
};

// Encodes, sums and decodes on the processor.
class HostCoder : public Coder {
 public:
  // Args: scratch: for what is encoded, until the transfer ends.
  explicit HostCoder(Scratch& scratch) : scratch_(scratch) {}

  uint8_t* Begin(const CodedTransfer& transfer) override;
  // Their values stay in the caches.
  size_t ChunksAtOnce() const override { return 1; }
  void Encode(int j, const Batch& batch) override;
  void AddUp(const Batch& sums, const Arrived& arrived) override;
  void Decode(int j, const Batch& sums) override;

 private:
  void CopyIn(int j, const Batch& batch, float* values) const;
  void EncodeValues(const Codec& codec, int j, const Batch& batch, CodedTransfer::Stage stage);

  Scratch& scratch_;
  const CodedTransfer* t_ = nullptr;
  float* values_ = nullptr;  // of the batch in work
  float* errors_ = nullptr;
};

}  // namespace tfdist
