// The algorithms for a transfer (transfer.h). They send data over links or through shared memory.
#pragma once

#include "collective/transfer.h"
#include "transport/exchange.h"
#include "transport/fabric.h"
#include "transport/host.h"

namespace tfdist {

// Runs a transfer among the members. Each member sends directly to every other member over a link.
// All members call this function together.
//
// When scattering, each member sends the values of every part to the owner of the part. The owner
// begins to reduce them before all values have arrived, but always in the members' order, so that
// the result does not depend on the order of arrival. When gathering, each owner sends its result
// to all members, chunk by chunk.
void RunTwoShot(Fabric& fabric, const Fingerprint& joined, const Members& members,
                const Transfer& transfer);

// Runs a small all-reduce. Every member sends its whole input to every other member, and reduces
// all inputs itself. This takes only one round of messages, while `RunTwoShot` takes two.
void RunOneShot(Fabric& fabric, const Fingerprint& joined, const Members& members,
                const Transfer& transfer);

// Runs an all-reduce around a ring. Each member receives from one neighbor and sends to the other,
// regardless of the number of members.
//
// The partial sums are rounded at every hop. This loses precision if partial results need a wider
// type (`PartialType`), so this algorithm must not be used for half types or for means of float32.
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009.
void RunRing(Fabric& fabric, const Fingerprint& joined, const Members& members,
             const Transfer& transfer);

// Runs a transfer among the ranks of one host, chunk by chunk through their shared memory segment.
//
// All ranks of the host call this function for the same transfers in the same order. Before that,
// each rank calls Host::Arrive. If both `in` and `out` contain all parts, they may be the same
// memory.
void RunShm(Host& host, const Transfer& transfer);

}  // namespace tfdist
