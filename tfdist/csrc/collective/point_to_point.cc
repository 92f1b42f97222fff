#include "collective/collectives.h"
#include "transport/exchange.h"

namespace tfdist {

void SendTo(Fabric& fabric, Operation& operation) {
  Exchange exchange(fabric, operation.fingerprint);
  exchange.Send(operation.peer, nullptr, 0);
  operation.in.ForEach(0, operation.in.bytes(), [&](const char* data, size_t bytes) {
    exchange.Send(operation.peer, data, bytes);
  });
  exchange.Run();
}

void ReceiveFrom(Fabric& fabric, Operation& operation) {
  Exchange exchange(fabric, operation.fingerprint);
  exchange.Receive(operation.peer, nullptr, 0);
  operation.out.ForEach(0, operation.out.bytes(), [&](char* data, size_t bytes) {
    exchange.Receive(operation.peer, data, bytes);
  });
  exchange.Run();
}

}  // namespace tfdist
