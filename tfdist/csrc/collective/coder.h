// Encodes and decodes values in transit, with the core's codecs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "collective/operation.h"
#include "collective/transfer.h"
#include "memory.h"

namespace tfdist {

// A transfer of encoded values: its values, members, and codec.
class CodedTransfer {
 public:
  // Args: error_begin: the offset of the transfer's first value in the compression's error.
  CodedTransfer(const Transfer& transfer, const Members& members, const Compression& compression,
                size_t error_begin);

  const Codec& codec() const { return compression_.codec; }
  const Codec& sums_codec() const { return sums_codec_; }
  // Whether a sum is replaced by the sign of the majority.
  bool votes() const;
  int members() const { return static_cast<int>(members_.ranks.size()); }
  int me() const { return members_.me; }

  const ConstBufferList& in() const { return transfer_.in; }
  const BufferList& out() const { return transfer_.out; }
  // The residual; empty without error feedback.
  const BufferList& error() const { return compression_.error; }

  // The number of values in member j's part, and the part's offset: in values of the transfer, and
  // in bytes of `in`, `out` and the error.
  size_t Count(int j) const;
  size_t Position(int j) const;
  size_t InBegin(int j) const { return transfer_.InBegin(j); }
  size_t OutBegin(int j) const { return transfer_.OutBegin(j); }
  size_t ErrorBegin(int j) const;

  // The bytes of all encoded values: the sent values, all ranks' values of the own part, and all
  // sums.
  size_t BufferBytes() const;

  // The number of consecutive values that share the first value's seed: a multiple of the block.
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

// The computation in a compressed all-reduce: on the processor, or on the GPU that holds the
// values.
class Coder {
 public:
  // Values [begin, begin + count) of a part, and the address of their encoded bytes: whole chunks,
  // except at the part's end.
  struct Batch {
    size_t begin;
    size_t count;
    uint8_t* encoded;
    size_t bytes;
  };
  // All members' encoded values of this rank's part, one after the other.
  struct Arrived {
    uint8_t* encoded;
    size_t stride;
  };

  virtual ~Coder() = default;

  // Begins a transfer, and returns memory for its encoded bytes. The object must live until the
  // transfer has ended.
  virtual uint8_t* Begin(const CodedTransfer& transfer) = 0;
  // The number of chunks to encode, sum or decode at once.
  virtual size_t ChunksAtOnce() const = 0;

  // Announces the values to be encoded later.
  virtual void Foresee(int, const Batch&) {}
  // Encodes values of member j's part.
  virtual void EncodeBatch(int j, const Batch& batch) = 0;
  // Sums all members' values of this rank's part in the members' order, encodes the sums, and
  // decodes them into the result, so that all members have the same bits.
  virtual void AddUp(const Batch& sums, const Arrived& arrived) = 0;
  // Waits until sums are in host memory; called before they are sent.
  virtual void Complete(const Batch&) {}
  // Decodes sums of member j's part into the result.
  virtual void DecodeBatch(int j, const Batch& sums) = 0;
};

// Encodes, sums and decodes on the processor.
class HostCoder : public Coder {
 public:
  // Args: scratch: memory for encoded values, until the transfer ends.
  explicit HostCoder(Scratch& scratch) : scratch_(scratch) {}

  uint8_t* Begin(const CodedTransfer& transfer) override;
  // Few enough that the values stay in the caches.
  size_t ChunksAtOnce() const override { return 1; }
  void EncodeBatch(int j, const Batch& batch) override;
  void AddUp(const Batch& sums, const Arrived& arrived) override;
  void DecodeBatch(int j, const Batch& sums) override;

 private:
  void CopyIn(int j, const Batch& batch, float* values) const;
  void EncodeValues(const Codec& codec, int j, const Batch& batch, CodedTransfer::Stage stage);

  Scratch& scratch_;
  const CodedTransfer* t_ = nullptr;
  float* values_ = nullptr;  // of the current batch
  float* errors_ = nullptr;
};

}  // namespace tfdist
