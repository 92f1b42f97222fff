// All-reduce algorithms over links and shared memory.
#pragma once

#include "collective/transfer.h"
#include "transport/exchange.h"
#include "transport/fabric.h"
#include "transport/host.h"

namespace tfdist {

// A transfer among some ranks over their links; each sends directly to every other rank.
//
// All members call this together. Each owner reduces its part in the members' order while the part
// is being received, and sends the result chunk by chunk.
void RunTwoShot(Fabric& fabric, const Fingerprint& joined, const Members& members,
                const Transfer& transfer);

// The same for a small all-reduce: every rank sends its whole input to every other rank, in one
// round instead of two.
void RunOneShot(Fabric& fabric, const Fingerprint& joined, const Members& members,
                const Transfer& transfer);

// An all-reduce around a ring: each member exchanges data with two others, regardless of the number
// of members.
//
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009. A sum is rounded at every hop, so the ring is not for half types.
void RunRing(Fabric& fabric, const Fingerprint& joined, const Members& members,
             const Transfer& transfer);

// Collectives among the ranks of one host, chunk by chunk through their segment.
//
// All ranks of the host call this in the same order, after Host::Arrive. `in` and `out` may be the
// same memory if both hold all parts.
void RunShm(Host& host, const Transfer& transfer);

}  // namespace tfdist
