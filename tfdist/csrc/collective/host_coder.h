// Encodes, sums and decodes on the processor.
#pragma once

#include "collective/coder.h"
#include "scratch.h"

namespace tfdist {

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
