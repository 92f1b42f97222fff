// All-to-all, and messages between two ranks.
#include <cstring>
#include <numeric>
#include <vector>

#include "collective/collectives.h"
#include "collective/transfer.h"
#include "transport/exchange.h"

namespace tfdist {
namespace {

std::vector<size_t> TellRows(Fabric& fabric, const Operation& operation) {
  const auto size = static_cast<size_t>(fabric.topology.size);
  std::vector<uint64_t> sent(operation.sent_rows.begin(), operation.sent_rows.end());
  std::vector<uint64_t> received(size);
  Exchange exchange(fabric, operation.fingerprint);
  for (size_t rank = 0; rank < size; ++rank) {
    if (static_cast<int>(rank) == fabric.topology.rank) {
      received[rank] = sent[rank];
      continue;
    }
    exchange.Send(static_cast<int>(rank), &sent[rank], sizeof(uint64_t));
    exchange.Receive(static_cast<int>(rank), &received[rank], sizeof(uint64_t));
  }
  exchange.Run();
  return {received.begin(), received.end()};
}

}  // namespace

void AllToAll(Fabric& fabric, Operation& operation) {
  const Topology& topology = fabric.topology;
  fabric.host->Arrive(operation.fingerprint);
  fabric.host->AwaitAll();
  const std::vector<size_t> received =
      AllocateResult(topology, operation, TellRows(fabric, operation));
  std::vector<size_t> sent;
  for (const size_t rows : operation.sent_rows) sent.push_back(rows * operation.row_bytes);
  Exchange exchange(fabric, operation.fingerprint);
  const auto begin = [](const std::vector<size_t>& bytes, int rank) {
    return std::accumulate(bytes.begin(), bytes.begin() + rank, size_t{0});
  };
  for (int step = 0; step < topology.size; ++step) {
    const int rank = (topology.rank + step) % topology.size;
    const auto i = static_cast<size_t>(rank);
    const size_t to = begin(received, rank), from = begin(sent, rank);
    if (step == 0) {
      size_t at = to;
      operation.in.ForEach(from, received[i], [&](const char* data, size_t bytes) {
        operation.out.ForEach(at, bytes, [&](char* out, size_t some) {
          std::memcpy(out, data, some);
          data += some;
        });
        at += bytes;
      });
      continue;
    }
    operation.in.ForEach(from, sent[i],
                         [&](const char* data, size_t bytes) { exchange.Send(rank, data, bytes); });
    operation.out.ForEach(to, received[i],
                          [&](char* data, size_t bytes) { exchange.Receive(rank, data, bytes); });
  }
  exchange.Run();
}

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
