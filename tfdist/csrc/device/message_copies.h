// Messages between the two GPUs of a group, by copies: the sender's GPU writes to the receiver's staging
// buffers, so no kernel waits for another one.
#pragma once

#include <cstddef>
#include <deque>

#include "collective/operation.h"
#include "device/device_rank.h"
#include "guard.h"
#include "transport/fabric.h"

namespace tfdist {

class MessageCopies {
 public:
  // Args: this rank; the bytes of each of the two staging buffers; what ends waits early.
  MessageCopies(DeviceRank& rank, size_t buffer_bytes, Guard& guard);

  // Sends or receives, and waits for the end. Called by both ranks together, whose operations match, after
  // they have met.
  // Args: what this rank sees of the receiver's staging buffers.
  void Run(Fabric& fabric, const Operation& operation, cuda::Address staging);

 private:
  void Launch(const Operation& operation, size_t chunk, cuda::Address staging);
  void AwaitChunk(size_t chunk);

  DeviceRank& rank_;
  const size_t slot_bytes_;
  Guard& guard_;
  std::deque<DeviceEvent> copied_;  // of each slot
};

}  // namespace tfdist
