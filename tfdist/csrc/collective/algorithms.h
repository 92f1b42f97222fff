// Algorithms that run a transfer over links or through shared memory.
#pragma once

#include "collective/transfer.h"
#include "transport/exchange.h"
#include "transport/fabric.h"
#include "transport/host.h"

namespace tfdist {

// Runs a transfer among some ranks over their links. Each member sends directly to every other
// member.
//
// All members call this function together. The owner of a part reduces the part in the members'
// order while the values are still arriving, and sends the result chunk by chunk.
void RunTwoShot(Fabric& fabric, const Fingerprint& joined, const Members& members,
                const Transfer& transfer);

// Runs a small all-reduce. Every member sends its whole input to every other member, and reduces
// all inputs itself. This takes one round of messages instead of the two rounds of `RunTwoShot`.
void RunOneShot(Fabric& fabric, const Fingerprint& joined, const Members& members,
                const Transfer& transfer);

// Runs an all-reduce around a ring. Each member exchanges data with only two other members,
// regardless of the number of members.
//
// A partial sum is rounded at every hop, so this algorithm must not be used for half types or for
// means of float32. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
// clusters of workstations", 2009.
void RunRing(Fabric& fabric, const Fingerprint& joined, const Members& members,
             const Transfer& transfer);

// Runs a transfer among the ranks of one host, chunk by chunk through their shared memory segment.
//
// All ranks of the host call this function for the same transfers in the same order, after
// Host::Arrive. `in` and `out` may be the same memory if both of them hold all parts.
void RunShm(Host& host, const Transfer& transfer);

}  // namespace tfdist
