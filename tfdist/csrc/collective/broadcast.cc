// Broadcast and barrier.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collective/algorithms.h"
#include "collective/collectives.h"
#include "error.h"
#include "transport/exchange.h"

namespace tfdist {
namespace {

constexpr size_t kChunk = 256 << 10;

// Returns the rank that exchanges data with other hosts on behalf of its host: the root on the
// root's host, and the first rank on every other host.
int LeaderOf(const Topology& topology, size_t host, int root) {
  const auto& ranks = topology.hosts[host];
  return static_cast<size_t>(topology.host_of[static_cast<size_t>(root)]) == host ? root : ranks[0];
}

// Sends the data from the root's host to all other hosts, along a binomial tree of their leaders. A
// leader forwards each chunk as soon as it has received the chunk.
void BetweenLeaders(Fabric& fabric, const Operation& operation, int root) {
  const Topology& topology = fabric.topology;
  const int hosts = static_cast<int>(topology.hosts.size());
  const int first = topology.host_of[static_cast<size_t>(root)];
  const int me = (topology.host_of[static_cast<size_t>(topology.rank)] - first + hosts) % hosts;
  const auto leader = [&](int position) {
    return LeaderOf(topology, static_cast<size_t>((position + first) % hosts), root);
  };
  Exchange exchange(fabric, operation.fingerprint);
  std::vector<int> children;
  int bit = 1;
  for (; bit < hosts && !(me & bit); bit <<= 1) {
    if (me + bit < hosts) children.push_back(leader(me + bit));
  }
  // The last child in the list has the deepest subtree. It is served first, because its subtree
  // takes the longest.
  std::reverse(children.begin(), children.end());
  // The data is sent only from parents to children, but the fingerprints are sent in both
  // directions. A parent therefore also notices if a child has joined another collective.
  for (const int child : children) {
    exchange.Send(child, nullptr, 0);
    exchange.Receive(child, nullptr, 0);
  }
  if (me != 0) {
    exchange.Send(leader(me - bit), nullptr, 0);
    exchange.Receive(leader(me - bit), nullptr, 0);
  }
  operation.out.ForEach(0, operation.out.bytes(), [&](char* data, size_t bytes) {
    for (size_t begin = 0; begin < bytes; begin += kChunk) {
      char* chunk = data + begin;
      const size_t length = std::min(kChunk, bytes - begin);
      const auto pass_on = [&exchange, &children, chunk, length](size_t received) {
        if (received < length) return;
        for (const int child : children) exchange.Send(child, chunk, length);
      };
      if (me == 0) {
        pass_on(length);
      } else {
        exchange.Receive(leader(me - bit), chunk, length, pass_on);
      }
    }
  });
  exchange.Run();
}

// Sends the data of the rank at position `from` to all other ranks of the host.
void OnHost(Host& host, const Operation& operation, int from, const ConstBufferList& data) {
  Transfer transfer;
  transfer.gather = true;
  transfer.part_bytes.assign(static_cast<size_t>(host.size()), 0);
  transfer.part_bytes[static_cast<size_t>(from)] = operation.out.bytes();
  if (host.rank() == from) transfer.in = data;
  transfer.out = operation.out;
  RunShm(host, transfer);
}

}  // namespace

// Only the root reads `operation.in`, which may be the same memory as `operation.out`.
void Broadcast(Fabric& fabric, Operation& operation) {
  const Topology& topology = fabric.topology;
  Host& host = *fabric.host;
  const int root = operation.fingerprint.root;
  if (root < 0 || root >= topology.size) {
    throw Error(Code::kInvalidArgument, "The root of a broadcast must be a rank from 0 to " +
                                            std::to_string(topology.size - 1) +
                                            ". Received: " + std::to_string(root) + ".");
  }
  const size_t bytes = operation.out.bytes();
  const auto my_host = static_cast<size_t>(topology.host_of[static_cast<size_t>(topology.rank)]);
  const int leader = LeaderOf(topology, my_host, root);
  const int place = topology.place_of[static_cast<size_t>(leader)];
  const bool one_host = topology.hosts.size() == 1;
  const bool along = one_host && bytes <= EagerSlot::kBytes;
  const bool is_root = topology.rank == root;

  host.Arrive(operation.fingerprint, along && is_root ? operation.in : ConstBufferList());
  if (is_root) {
    Transfer own;
    own.part_bytes = {bytes};
    own.in = operation.in;
    own.out = operation.out;
    CopyPart(own, 0, 0, bytes);
  }
  if (along) {
    host.AwaitAll();
    if (is_root) return;
    const char* from = host.Await(place).data;
    operation.out.ForEach(0, bytes, [&from](char* to, size_t some) {
      std::memcpy(to, from, some);
      from += some;
    });
    return;
  }
  if (!one_host && topology.rank == leader) BetweenLeaders(fabric, operation, root);
  if (host.size() > 1) OnHost(host, operation, place, operation.out.Const());
}

void Barrier(Fabric& fabric, Operation& operation) {
  fabric.host->Arrive(operation.fingerprint);
  fabric.host->AwaitAll();
  if (fabric.topology.hosts.size() == 1) return;
  // A transfer without data: the ranks exchange only their fingerprints. A rank can therefore not
  // leave the barrier before all other ranks have joined it.
  Transfer nothing;
  nothing.gather = true;
  nothing.part_bytes.assign(static_cast<size_t>(fabric.topology.size), 0);
  RunTwoShot(fabric, operation.fingerprint, Everyone(fabric.topology), nothing);
}

}  // namespace tfdist
