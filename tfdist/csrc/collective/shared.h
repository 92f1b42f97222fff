// Collectives among the ranks of one host, chunk by chunk through their segment.
#pragma once

#include "collective/transfer.h"
#include "transport/host.h"

namespace tfdist {

// Called by all ranks of the host in the same order; they have arrived (Host::Arrive) before.
// `in` and `out` may be the same memory, if both hold all parts.
void RunShared(Host& host, const Transfer& transfer);

}  // namespace tfdist
