// The collectives, independent of the transport. All ranks must call the same collectives in the
// same order.
#pragma once

#include "collective/operation.h"
#include "transport/fabric.h"

namespace tfdist {

// The algorithms for an all-reduce.
enum class Algorithm {
  kAuto,
  kShm,           // through the shared memory of a host, chunk by chunk
  kOneShot,       // each rank sends its whole input to every other rank
  kTwoShot,       // each rank reduces one part, and sends the result to every other rank
  kRing,          // each rank exchanges data with only two other ranks
  kHierarchical,  // first within each host, then between the hosts
};

// Returns the algorithm with this name, or kAuto if the name is empty. If the name is unknown,
// throws Error(kInvalidArgument) with a list of the known names.
Algorithm AlgorithmNamed(const char* name);
const char* NameOf(Algorithm algorithm);

void AllReduce(Fabric& fabric, Operation& operation, Algorithm algorithm);
void ReduceScatter(Fabric& fabric, Operation& operation);
void AllGather(Fabric& fabric, Operation& operation);
void Broadcast(Fabric& fabric, Operation& operation);
void AllToAll(Fabric& fabric, Operation& operation);
void Barrier(Fabric& fabric, Operation& operation);
void SendTo(Fabric& fabric, Operation& operation);
void ReceiveFrom(Fabric& fabric, Operation& operation);

}  // namespace tfdist
