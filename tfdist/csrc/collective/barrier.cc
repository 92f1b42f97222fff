#include "collective/collectives.h"
#include "collective/direct.h"

namespace tfdist {

void Barrier(Fabric& fabric, Operation& operation) {
  fabric.host->Arrive(operation.fingerprint);
  fabric.host->AwaitAll();
  if (fabric.topology.hosts.size() == 1) return;
  // A fingerprint to and from everyone, and nothing behind it.
  Transfer nothing;
  nothing.gather = true;
  nothing.part_bytes.assign(static_cast<size_t>(fabric.topology.size), 0);
  RunDirect(fabric, operation.fingerprint, Everyone(fabric.topology), nothing);
}

}  // namespace tfdist
