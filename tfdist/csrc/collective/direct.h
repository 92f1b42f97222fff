// All-reduce algorithms over links and shared memory.
#pragma once

#include "collective/transfer.h"
#include "transport/exchange.h"
#include "transport/fabric.h"
#include "transport/host.h"

namespace tfdist {

// A transfer among some ranks over their links: each sends to every other one directly.
//
// All members call this together. Each part is reduced by its owner, in the members' order, while
// it still arrives, and leaves again chunk by chunk.
void RunDirect(Fabric& fabric, const Fingerprint& joined, const Members& members,
               const Transfer& transfer);

// The same for a small all-reduce: everyone sends everything to everyone, one way instead of two.
void RunWhole(Fabric& fabric, const Fingerprint& joined, const Members& members,
              const Transfer& transfer);

// An all-reduce around a ring: each member talks to two others only, however many there are.
//
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009. A sum is rounded at every hop, so it is not for half types.
void RunRing(Fabric& fabric, const Fingerprint& joined, const Members& members,
             const Transfer& transfer);

// Collectives among the ranks of one host, chunk by chunk through their segment.
//
// Called by all ranks of the host in the same order; they have arrived (Host::Arrive) before.
// `in` and `out` may be the same memory, if both hold all parts.
void RunShared(Host& host, const Transfer& transfer);

}  // namespace tfdist
