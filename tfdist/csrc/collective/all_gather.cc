#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "collective/algorithms.h"
#include "collective/collectives.h"
#include "collective/transfer.h"

namespace tfdist {
namespace {

// The number of rows that each rank contributes. If `arrived` is true, the eager slots of the ranks
// contain the rows as well.
struct Sizes {
  std::vector<size_t> rows;
  bool arrived = false;
};

// The maximum size of the rows in an eager slot. The slot begins with the number of rows, and the
// rows follow.
constexpr size_t kMaxEagerRowBytes = EagerSlot::kBytes - sizeof(uint64_t);

Sizes OnOneHost(Host& host, const Operation& operation) {
  const uint64_t own = operation.sent_rows.front();
  std::vector<BasicBuffer<const char>> along{{reinterpret_cast<const char*>(&own), sizeof(own)}};
  const auto fits = [&operation](uint64_t rows) {
    return operation.row_bytes == 0 || rows <= kMaxEagerRowBytes / operation.row_bytes;
  };
  if (fits(own)) {
    operation.in.ForEach(0, operation.in.bytes(), [&along](const char* data, size_t bytes) {
      along.push_back({data, bytes});
    });
  }
  host.Arrive(operation.fingerprint, ConstBufferList(along));
  Sizes sizes;
  sizes.arrived = true;
  for (int rank = 0; rank < host.size(); ++rank) {
    uint64_t rows = own;
    if (rank != host.rank()) std::memcpy(&rows, host.Await(rank).data, sizeof(rows));
    sizes.rows.push_back(rows);
    sizes.arrived = sizes.arrived && fits(rows);
  }
  return sizes;
}

Sizes BetweenHosts(Fabric& fabric, const Operation& operation) {
  fabric.host->Arrive(operation.fingerprint);
  fabric.host->AwaitAll();
  const auto size = static_cast<size_t>(fabric.topology.size);
  const uint64_t own = operation.sent_rows.front();
  std::vector<uint64_t> all(size);
  Transfer transfer;
  transfer.gather = true;
  transfer.part_bytes.assign(size, sizeof(own));
  transfer.in = ConstBufferList(reinterpret_cast<const char*>(&own), sizeof(own));
  transfer.out = BufferList(reinterpret_cast<char*>(all.data()), size * sizeof(own));
  RunTwoShot(fabric, operation.fingerprint, Everyone(fabric.topology), transfer);
  return {{all.begin(), all.end()}, false};
}

}  // namespace

void AllGather(Fabric& fabric, Operation& operation) {
  Host& host = *fabric.host;
  const bool one_host = fabric.topology.hosts.size() == 1;
  const Sizes sizes = one_host ? OnOneHost(host, operation) : BetweenHosts(fabric, operation);
  Transfer transfer;
  transfer.gather = true;
  transfer.part_bytes = AllocateResult(fabric.topology, operation, sizes.rows);
  transfer.in = operation.in;
  transfer.out = operation.out;
  if (!one_host) {
    return RunTwoShot(fabric, operation.fingerprint, Everyone(fabric.topology), transfer);
  }
  if (!sizes.arrived && host.size() > 1) return RunShm(host, transfer);
  CopyPart(transfer, host.rank(), 0, operation.in.bytes());
  for (int rank = 0; rank < host.size(); ++rank) {
    if (rank == host.rank()) continue;
    const char* from = host.Await(rank).data + sizeof(uint64_t);
    transfer.out.ForEach(transfer.Begin(rank), transfer.part_bytes[static_cast<size_t>(rank)],
                         [&from](char* to, size_t bytes) {
                           std::memcpy(to, from, bytes);
                           from += bytes;
                         });
  }
}

}  // namespace tfdist
