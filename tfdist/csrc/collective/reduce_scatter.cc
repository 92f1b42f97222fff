#include <vector>

#include "collective/collectives.h"
#include "collective/direct.h"
#include "collective/shared.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {

void ReduceScatter(Fabric& fabric, Operation& operation) {
  CheckReducible(operation.fingerprint.type, operation.fingerprint.op);
  const int size = fabric.topology.size;
  Transfer transfer;
  transfer.scatter = true;
  transfer.type = operation.fingerprint.type;
  transfer.op = operation.fingerprint.op;
  transfer.in = operation.in;
  transfer.out = operation.out;
  if (transfer.op == ReduceOp::kMean) transfer.divisor = size;
  transfer.part_bytes.assign(static_cast<size_t>(size), operation.out.bytes());
  fabric.host->Arrive(operation.fingerprint);
  if (fabric.topology.hosts.size() == 1 && size > 1) {
    return RunShared(*fabric.host, transfer);
  }
  fabric.host->AwaitAll();
  RunDirect(fabric, operation.fingerprint, Everyone(fabric.topology), transfer);
}

}  // namespace tfdist
