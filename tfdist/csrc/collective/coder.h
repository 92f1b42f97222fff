// The computation in a compressed all-reduce: encoding, decoding and summing values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "collective/operation.h"
#include "collective/transfer.h"
#include "memory.h"

namespace tfdist {

// Describes a transfer of encoded values: where the values are, which ranks take part, and which
// codec is used.
class CodedTransfer {
 public:
  // Args: error_begin: the offset in the residual, in bytes, of the element for the transfer's
  // first value.
  CodedTransfer(const Transfer& transfer, const Members& members, const Compression& compression,
                size_t error_begin);

  const Codec& codec() const { return compression_.codec; }
  const Codec& sums_codec() const { return sums_codec_; }
  // Returns whether the members vote. In a vote, each sum of signs is replaced with the sign of the
  // sum.
  bool votes() const;
  int members() const { return static_cast<int>(members_.ranks.size()); }
  int me() const { return members_.me; }

  const ConstBufferList& in() const { return transfer_.in; }
  const BufferList& out() const { return transfer_.out; }
  // Returns the residual of error feedback, which is empty if error feedback is not used.
  const BufferList& error() const { return compression_.error; }

  // `Count` returns the number of values in member j's part. `Position` returns the index of the
  // part's first value among all values of the transfer. The other functions return the offset in
  // bytes at which the part begins: `InBegin` in the input, `OutBegin` in the output, and
  // `ErrorBegin` in the residual.
  size_t Count(int j) const;
  size_t Position(int j) const;
  size_t InBegin(int j) const { return transfer_.InBegin(j); }
  size_t OutBegin(int j) const { return transfer_.OutBegin(j); }
  size_t ErrorBegin(int j) const;

  // Returns the size of the buffer for all encoded values on this rank. The buffer contains the
  // values that this rank sends, the values that it receives from the members for its own part, and
  // the encoded sums of all parts.
  size_t BufferBytes() const;

  // Returns the number of values in a chunk, which is a multiple of the block size. Each chunk is
  // encoded with its own seed, which depends on the position of the chunk's first value.
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

// The interface for the computation in a compressed all-reduce. `HostCoder` computes on the CPU,
// and `DeviceCoder` (device/compressed_path.h) computes on the GPU that holds the values.
class Coder {
 public:
  // The values [begin, begin + count) of a part, which are processed together. In encoded form,
  // they occupy `bytes` bytes at `encoded`. A batch consists of whole chunks, except that the last
  // batch of a part may end with a shorter chunk.
  struct Batch {
    size_t begin;
    size_t count;
    uint8_t* encoded;
    size_t bytes;
  };
  // The encoded values that the members have sent for this rank's part. The values from member j
  // begin at the address encoded + j * stride.
  struct Arrived {
    uint8_t* encoded;
    size_t stride;
  };

  virtual ~Coder() = default;

  // Begins a transfer, and returns a buffer for its encoded values. The object `transfer` must live
  // until the transfer has ended.
  virtual uint8_t* Begin(const CodedTransfer& transfer) = 0;
  // Returns the number of chunks that form a batch, and are therefore encoded, summed or decoded
  // together.
  virtual size_t ChunksAtOnce() const = 0;

  // Announces a batch for which `EncodeBatch` will be called, so that a GPU can already begin to
  // encode it.
  virtual void Foresee(int, const Batch&) {}
  // Encodes the values that this rank contributes to member j's part.
  virtual void EncodeBatch(int j, const Batch& batch) = 0;
  // Sums the values that all members contribute to this rank's part, in the members' order, and
  // encodes the sums. Then decodes the encoded sums into this rank's result, so that all members
  // get the same bits.
  virtual void AddUp(const Batch& sums, const Arrived& arrived) = 0;
  // Waits until the encoded sums are in host memory. The caller does this before it sends the sums.
  virtual void Complete(const Batch&) {}
  // Decodes the encoded sums of member j's part into this rank's result.
  virtual void DecodeBatch(int j, const Batch& sums) = 0;
};

// Encodes, sums and decodes on the CPU.
class HostCoder : public Coder {
 public:
  // Args: scratch: the memory from which the coder takes its buffers. It must not be used for
  // anything else until the transfer has ended.
  explicit HostCoder(Scratch& scratch) : scratch_(scratch) {}

  uint8_t* Begin(const CodedTransfer& transfer) override;
  // A batch is a single chunk, which is small enough to stay in the CPU's caches.
  size_t ChunksAtOnce() const override { return 1; }
  void EncodeBatch(int j, const Batch& batch) override;
  void AddUp(const Batch& sums, const Arrived& arrived) override;
  void DecodeBatch(int j, const Batch& sums) override;

 private:
  void CopyIn(int j, const Batch& batch, float* values) const;
  void EncodeValues(const Codec& codec, int j, const Batch& batch, CodedTransfer::Stage stage);

  Scratch& scratch_;
  const CodedTransfer* t_ = nullptr;
  float* values_ = nullptr;  // the values of the current batch
  float* errors_ = nullptr;
};

}  // namespace tfdist
