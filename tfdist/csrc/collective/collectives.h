// The collectives, independent of the transport; all ranks call the same ones in order.
#pragma once

#include "collective/operation.h"
#include "transport/fabric.h"

namespace tfdist {

// How to run an all-reduce.
enum class Algorithm {
  kAuto,
  kShm,           // through the host's segment, chunk by chunk
  kOneShot,       // everyone sends everything to everyone
  kTwoShot,       // each rank reduces a part, sent to it directly
  kRing,          // each rank talks to two others
  kHierarchical,  // inside the hosts first, then between them
};

// Throws Error(kInvalidArgument) listing the known names.
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
