#include <algorithm>
#include <string>

#include "collective/collectives.h"
#include "collective/direct.h"
#include "collective/members.h"
#include "collective/ring.h"
#include "collective/shared.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {

struct Named {
  const char* name;
  Algorithm algorithm;
};
constexpr Named kAlgorithms[] = {
    {"auto", Algorithm::kAuto},     {"shared", Algorithm::kShared},
    {"whole", Algorithm::kWhole},   {"direct", Algorithm::kDirect},
    {"ring", Algorithm::kRing},     {"hierarchical", Algorithm::kHierarchical},
};

constexpr int kMostArrivals = 64;
// Up to here a message between hosts costs its way, not its bytes.
constexpr size_t kWholeBytes = 16 << 10;
constexpr int kMostWhole = 64;
// With more members a ring has fewer connections to serve, and no rank has many senders at once.
constexpr int kMostDirect = 16;

double Scale(const Operation& operation, int size) {
  return operation.fingerprint.op == ReduceOp::kMean ? 1.0 / size : 1.0;
}

Transfer Everything(const Operation& operation, int participants, int owners, int size) {
  Transfer transfer;
  transfer.scatter = transfer.gather = true;
  transfer.type = operation.fingerprint.type;
  transfer.op = operation.fingerprint.op;
  transfer.in = operation.in;
  transfer.out = operation.out;
  transfer.scale = Scale(operation, size);
  transfer.part_bytes =
      CutEvenly(operation.in.bytes(), SizeOf(transfer.type), owners, participants);
  return transfer;
}

// Every rank of the host reads what every other one has brought along, and adds it up.
void AmongArrivals(Host& host, const Operation& operation, double scale) {
  const DType type = operation.fingerprint.type;
  const ReduceOp op = operation.fingerprint.op;
  const char* arrived[kMostArrivals] = {};
  for (int rank = 0; rank < host.size(); ++rank) {
    if (rank != host.rank()) arrived[rank] = host.Await(rank).data;
  }
  const void* all[kMostArrivals];
  size_t begin = 0;
  const ConstPieces& own = operation.in;
  operation.out.ForEach(0, operation.out.bytes(), [&](char* out, size_t bytes) {
    for (int rank = 0; rank < host.size(); ++rank) all[rank] = arrived[rank] + begin;
    // Not from where it was written just now, which would wait for the writing.
    all[host.rank()] = own.At(begin).data;
    Reduce({type, op, scale, all, host.size(), bytes / SizeOf(type), out});
    begin += bytes;
  });
}

bool FitsArrivals(size_t bytes, int ranks) {
  return ranks <= kMostArrivals && bytes <= Arrival::kBytes &&
         bytes * static_cast<size_t>(ranks) <= 8 * Arrival::kBytes;
}

Algorithm BetweenHosts(size_t bytes, int members) {
  if (bytes <= kWholeBytes && members <= kMostWhole) return Algorithm::kWhole;
  return members <= kMostDirect ? Algorithm::kDirect : Algorithm::kRing;
}

void OverLinks(Fabric& fabric, const Operation& operation, const Members& members,
               Transfer transfer, Algorithm algorithm) {
  const int size = static_cast<int>(members.ranks.size());
  transfer.part_bytes = CutEvenly(transfer.in.bytes(), SizeOf(transfer.type), size, size);
  if (algorithm == Algorithm::kAuto) {
    algorithm = BetweenHosts(transfer.in.bytes(), size);
  }
  // A ring would round a half type's sum at every hop.
  const bool half = SizeOf(transfer.type) == 2;
  if (half && algorithm == Algorithm::kRing) algorithm = Algorithm::kDirect;
  switch (algorithm) {
    case Algorithm::kWhole:
      return RunWhole(fabric, operation.fingerprint, members, transfer);
    case Algorithm::kRing:
      return RunRing(fabric, operation.fingerprint, members, transfer);
    default:
      return RunDirect(fabric, operation.fingerprint, members, transfer);
  }
}

// Scattered over the host's ranks, each of which carries its part between the hosts, then gathered.
void Hierarchical(Fabric& fabric, const Operation& operation) {
  const Topology& topology = fabric.topology;
  Host& host = *fabric.host;
  size_t carriers = topology.my_host().size(), most = 0;
  for (const auto& ranks : topology.hosts) {
    carriers = std::min(carriers, ranks.size());
    most = std::max(most, ranks.size());
  }
  const Transfer whole =
      Everything(operation, host.size(), static_cast<int>(carriers), topology.size);

  if (carriers == most && FitsArrivals(operation.in.bytes(), host.size())) {
    Transfer between = whole;
    if (host.size() > 1) {
      AmongArrivals(host, operation, 1.0);
    } else {
      Transfer own = whole;
      own.part_bytes = {whole.in.bytes()};
      CopyPart(own, 0, 0, whole.in.bytes());
    }
    between.in = operation.out.Const();
    return OverLinks(fabric, operation, Counterparts(topology), between, Algorithm::kAuto);
  }
  if (host.size() == 1 && carriers == most) {
    return OverLinks(fabric, operation, Counterparts(topology), whole, Algorithm::kAuto);
  }

  const size_t bytes = whole.part_bytes[static_cast<size_t>(host.rank())];
  char* part = fabric.host_scratch.Take(std::max<size_t>(bytes, 1));
  Transfer inside = whole;
  inside.gather = false;
  inside.scale = 1.0;
  inside.out = Pieces(part, bytes);
  if (host.size() > 1) {
    RunShared(host, inside);
  } else {
    CopyPart(inside, 0, 0, bytes);
  }
  if (host.rank() < static_cast<int>(carriers)) {
    Transfer between = whole;
    between.in = ConstPieces(part, bytes);
    between.out = Pieces(part, bytes);
    OverLinks(fabric, operation, Counterparts(topology), between, Algorithm::kAuto);
  }
  Transfer back = whole;
  back.scatter = false;
  back.in = ConstPieces(part, bytes);
  if (host.size() > 1) {
    RunShared(host, back);
  } else {
    CopyPart(back, 0, 0, bytes);
  }
}

}  // namespace

Algorithm AlgorithmNamed(const char* name) {
  std::string names;
  for (const auto& [known, algorithm] : kAlgorithms) {
    if (std::string(name) == known || !*name) return algorithm;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  throw Error(Code::kInvalidArgument,
              "The algorithm must be one of " + names + ". Received: " + name + ".");
}

void AllReduce(Fabric& fabric, Operation& operation, Algorithm algorithm) {
  CheckReducible(operation.fingerprint.type, operation.fingerprint.op);
  const Topology& topology = fabric.topology;
  Host& host = *fabric.host;
  const bool one_host = topology.hosts.size() == 1;
  if (algorithm == Algorithm::kAuto) {
    algorithm = one_host ? Algorithm::kShared : Algorithm::kHierarchical;
  }
  if ((algorithm == Algorithm::kShared && !one_host) || topology.size == 1) {
    algorithm = Algorithm::kHierarchical;
  }
  const bool small = FitsArrivals(operation.in.bytes(), host.size()) &&
                     (algorithm == Algorithm::kShared || algorithm == Algorithm::kHierarchical);
  host.Arrive(operation.fingerprint, small ? operation.in : ConstPieces());
  if (algorithm == Algorithm::kHierarchical) return Hierarchical(fabric, operation);
  if (algorithm == Algorithm::kShared && small) {
    return AmongArrivals(host, operation, Scale(operation, topology.size));
  }
  const Transfer whole = Everything(operation, topology.size, topology.size, topology.size);
  if (algorithm == Algorithm::kShared) return RunShared(host, whole);
  host.AwaitAll();
  OverLinks(fabric, operation, Everyone(topology), whole, algorithm);
}

}  // namespace tfdist
