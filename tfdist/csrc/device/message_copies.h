// A message between the two GPUs of a group, by copies: the sender's GPU writes to the receiver's staging
// buffers, so no kernel waits for another one.
#pragma once

#include <cstddef>

#include "collective/operation.h"
#include "device/device_rank.h"
#include "guard.h"
#include "transport/fabric.h"

namespace tfdist {

// Sends or receives, and waits for the end. Called by both ranks together, whose operations match.
// Args: this rank; what it sees of the receiver's staging, two buffers of `buffer_bytes`; what ends
// waits early.
void CopyMessage(Fabric& fabric, const Operation& operation, DeviceRank& rank,
                 cuda::Address staging, size_t buffer_bytes, Guard& guard);

}  // namespace tfdist
