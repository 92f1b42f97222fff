#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "collective/direct.h"
#include "collective/shared.h"
#include "collective/sizes.h"

namespace tfdist {
namespace {

// How many bytes each rank brings, and whether all of them lie with the arrivals already.
struct Sizes {
  std::vector<size_t> bytes;
  bool arrived = false;
};

// What a rank brings along: its size, and its data if they are few.
constexpr size_t kMostAlong = Arrival::kBytes - sizeof(uint64_t);

Sizes OnOneHost(Host& host, const Operation& operation) {
  const uint64_t own = operation.in.bytes();
  std::vector<BasicPiece<const char>> along{{reinterpret_cast<const char*>(&own), sizeof(own)}};
  if (own <= kMostAlong) {
    operation.in.ForEach(0, own, [&along](const char* data, size_t bytes) {
      along.push_back({data, bytes});
    });
  }
  host.Arrive(operation.fingerprint, ConstPieces(along));
  Sizes sizes;
  sizes.arrived = true;
  for (int rank = 0; rank < host.size(); ++rank) {
    uint64_t bytes = own;
    if (rank != host.rank()) std::memcpy(&bytes, host.Await(rank).data, sizeof(bytes));
    sizes.bytes.push_back(bytes);
    sizes.arrived = sizes.arrived && bytes <= kMostAlong;
  }
  return sizes;
}

Sizes BetweenHosts(Fabric& fabric, const Operation& operation) {
  fabric.host->Arrive(operation.fingerprint);
  fabric.host->AwaitAll();
  const auto size = static_cast<size_t>(fabric.topology.size);
  const uint64_t own = operation.in.bytes();
  std::vector<uint64_t> all(size);
  Transfer transfer;
  transfer.gather = true;
  transfer.part_bytes.assign(size, sizeof(own));
  transfer.in = ConstPieces(reinterpret_cast<const char*>(&own), sizeof(own));
  transfer.out = Pieces(reinterpret_cast<char*>(all.data()), size * sizeof(own));
  RunDirect(fabric, operation.fingerprint, Everyone(fabric.topology), transfer);
  return {{all.begin(), all.end()}, false};
}

}  // namespace

void AllGather(Fabric& fabric, Operation& operation) {
  Host& host = *fabric.host;
  const bool one_host = fabric.topology.hosts.size() == 1;
  const Sizes sizes =
      one_host ? OnOneHost(host, operation) : BetweenHosts(fabric, operation);
  MakeRoom(fabric.topology, operation, sizes.bytes);
  Transfer transfer;
  transfer.gather = true;
  transfer.part_bytes = sizes.bytes;
  transfer.in = operation.in;
  transfer.out = operation.out;
  if (!one_host) {
    return RunDirect(fabric, operation.fingerprint, Everyone(fabric.topology), transfer);
  }
  if (!sizes.arrived && host.size() > 1) return RunShared(host, transfer);
  CopyPart(transfer, host.rank(), 0, operation.in.bytes());
  for (int rank = 0; rank < host.size(); ++rank) {
    if (rank == host.rank()) continue;
    const char* from = host.Await(rank).data + sizeof(uint64_t);
    transfer.out.ForEach(transfer.Begin(rank), sizes.bytes[static_cast<size_t>(rank)],
                         [&from](char* to, size_t bytes) {
                           std::memcpy(to, from, bytes);
                           from += bytes;
                         });
  }
}

}  // namespace tfdist
