#include <string>

#include "collective/collectives.h"
#include "error.h"
#include "transport/exchange.h"

namespace tfdist {
namespace {

size_t CheckPeer(const Fabric& fabric, int peer) {
  const Topology& topology = fabric.topology;
  if (peer < 0 || peer >= topology.size || peer == topology.rank) {
    throw Error(Code::kInvalidArgument,
                "Rank " + std::to_string(topology.rank) + " of " + std::to_string(topology.size) +
                    " can exchange messages with other ranks of its group only. Received: rank " +
                    std::to_string(peer) + ".");
  }
  return static_cast<size_t>(peer);
}

}  // namespace

void SendTo(Fabric& fabric, Operation& operation) {
  const size_t peer = CheckPeer(fabric, operation.peer);
  operation.fingerprint.sequence = ++fabric.messages_to[peer];
  Exchange exchange(fabric, operation.fingerprint);
  exchange.Send(operation.peer, nullptr, 0);
  operation.in.ForEach(0, operation.in.bytes(), [&](const char* data, size_t bytes) {
    exchange.Send(operation.peer, data, bytes);
  });
  exchange.Run();
}

void ReceiveFrom(Fabric& fabric, Operation& operation) {
  const size_t peer = CheckPeer(fabric, operation.peer);
  operation.fingerprint.sequence = ++fabric.messages_from[peer];
  Exchange exchange(fabric, operation.fingerprint);
  exchange.Receive(operation.peer, nullptr, 0);
  operation.out.ForEach(0, operation.out.bytes(), [&](char* data, size_t bytes) {
    exchange.Receive(operation.peer, data, bytes);
  });
  exchange.Run();
}

}  // namespace tfdist
