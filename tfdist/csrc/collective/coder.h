// Encodes and decodes the values of a compressed all-reduce.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "collective/operation.h"
#include "collective/transfer.h"
#include "memory.h"

namespace tfdist {

// Describes a transfer of encoded values: the values, the members, and the codec.
class CodedTransfer {
 public:
  // Args: error_begin: the offset of the transfer's first value in the residual, in bytes.
  CodedTransfer(const Transfer& transfer, const Members& members, const Compression& compression,
                size_t error_begin);

  const Codec& codec() const { return compression_.codec; }
  const Codec& sums_codec() const { return sums_codec_; }
  // Whether the members vote: each sum of signs is replaced with the sign of the majority.
  bool votes() const;
  int members() const { return static_cast<int>(members_.ranks.size()); }
  int me() const { return members_.me; }

  const ConstBufferList& in() const { return transfer_.in; }
  const BufferList& out() const { return transfer_.out; }
  // The residual of error feedback; empty without error feedback.
  const BufferList& error() const { return compression_.error; }

  // The number of values in member j's part, and the position of this part. `Position` is the index
  // of its first value in the transfer. The other functions return the offset of the part in bytes:
  // in `in`, in `out`, and in the residual.
  size_t Count(int j) const;
  size_t Position(int j) const;
  size_t InBegin(int j) const { return transfer_.InBegin(j); }
  size_t OutBegin(int j) const { return transfer_.OutBegin(j); }
  size_t ErrorBegin(int j) const;

  // Returns the size of all encoded values that this rank handles: the values that it sends, the
  // values of its own part that it receives from all members, and the sums of all parts.
  size_t BufferBytes() const;

  // The number of consecutive values that are encoded with one seed, which is the seed of the first
  // of them. It is a multiple of the block size.
  size_t chunk() const { return chunk_; }
  enum class Stage : uint32_t { kValues, kSums };
  uint32_t Seed(Stage stage, size_t position) const {
    return seed_ + static_cast<uint32_t>(position) * kSeedStep + static_cast<uint32_t>(stage);
  }
  // The difference between the seeds of two consecutive positions.
  static constexpr uint32_t kSeedStep = 0x85ebca6bu;

 private:
  const Transfer& transfer_;
  const Members& members_;
  const Compression& compression_;
  const size_t error_begin_;
  const Codec sums_codec_;
  const size_t chunk_;
  const uint32_t seed_;
};

// Does the computation of a compressed all-reduce: on the CPU, or on the GPU that holds the values.
class Coder {
 public:
  // The values [begin, begin + count) of a part, and the memory of their encoding: `bytes` bytes at
  // `encoded`. A batch consists of whole chunks, unless it ends at the end of the part.
  struct Batch {
    size_t begin;
    size_t count;
    uint8_t* encoded;
    size_t bytes;
  };
  // The encoded values of this rank's part, as received from all members. The values of each member
  // begin `stride` bytes after the values of the previous member.
  struct Arrived {
    uint8_t* encoded;
    size_t stride;
  };

  virtual ~Coder() = default;

  // Begins a transfer, and returns memory for its encoded values. The object `transfer` must live
  // until the transfer has ended.
  virtual uint8_t* Begin(const CodedTransfer& transfer) = 0;
  // Returns the number of chunks in a batch, which are encoded, summed or decoded together.
  virtual size_t ChunksAtOnce() const = 0;

  // Announces a batch that will be encoded later, so that the coder can prepare it.
  virtual void Foresee(int, const Batch&) {}
  // Encodes this rank's values of member j's part.
  virtual void EncodeBatch(int j, const Batch& batch) = 0;
  // Sums the values of this rank's part over all members, in the members' order. Encodes the sums,
  // and decodes the encoded sums into this rank's result, so that all members have the same bits.
  virtual void AddUp(const Batch& sums, const Arrived& arrived) = 0;
  // Waits until the encoded sums are in host memory. Called before they are sent.
  virtual void Complete(const Batch&) {}
  // Decodes the sums of member j's part into the result.
  virtual void DecodeBatch(int j, const Batch& sums) = 0;
};

// Encodes, sums and decodes on the CPU.
class HostCoder : public Coder {
 public:
  // Args: scratch: provides the memory for the encoded values, which is used until the transfer
  // ends.
  explicit HostCoder(Scratch& scratch) : scratch_(scratch) {}

  uint8_t* Begin(const CodedTransfer& transfer) override;
  // One chunk is small enough to stay in the CPU's caches.
  size_t ChunksAtOnce() const override { return 1; }
  void EncodeBatch(int j, const Batch& batch) override;
  void AddUp(const Batch& sums, const Arrived& arrived) override;
  void DecodeBatch(int j, const Batch& sums) override;

 private:
  void CopyIn(int j, const Batch& batch, float* values) const;
  void EncodeValues(const Codec& codec, int j, const Batch& batch, CodedTransfer::Stage stage);

  Scratch& scratch_;
  const CodedTransfer* t_ = nullptr;
  float* values_ = nullptr;  // values of the current batch
  float* errors_ = nullptr;
};

}  // namespace tfdist
