// All-reduce and reduce-scatter.
#include <algorithm>
#include <string>
#include <vector>

#include "collective/algorithms.h"
#include "collective/collectives.h"
#include "collective/compressed.h"
#include "collective/transfer.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {

struct Named {
  const char* name;
  Algorithm algorithm;
};
constexpr Named kAlgorithms[] = {
    {"auto", Algorithm::kAuto},        {"shm", Algorithm::kShm},
    {"one_shot", Algorithm::kOneShot}, {"two_shot", Algorithm::kTwoShot},
    {"ring", Algorithm::kRing},        {"hierarchical", Algorithm::kHierarchical},
};

constexpr int kMaxEagerRanks = 64;
// Up to this size, the time to send a message between hosts is mainly latency. `RunOneShot` is then
// the fastest algorithm, because it takes only one round of messages.
constexpr size_t kOneShotBytes = 16 << 10;
constexpr int kMaxOneShotRanks = 64;
// With more members than this, a ring is used instead. In a ring, each member has only two
// connections, and no member receives from many senders concurrently.
constexpr int kMaxTwoShotRanks = 16;

double Divisor(const Operation& operation, int size) {
  return operation.fingerprint.op == ReduceOp::kMean ? size : 1.0;
}

Transfer Everything(const Operation& operation, int participants, int owners, int size) {
  Transfer transfer;
  transfer.scatter = transfer.gather = true;
  transfer.type = operation.fingerprint.type;
  transfer.op = operation.fingerprint.op;
  transfer.in = operation.in;
  transfer.out = operation.out;
  transfer.divisor = Divisor(operation, size);
  transfer.part_bytes =
      CutEvenly(operation.in.bytes(), SizeOf(transfer.type), owners, participants);
  return transfer;
}

// Reduces the inputs of all ranks of the host. The inputs must be small enough for the eager slots.
// Reads the inputs of the other ranks from their eager slots, and writes the results to `out` as
// elements of type `out_type`.
void ReduceEagerly(Host& host, const Operation& operation, double divisor, const BufferList& out,
                   DType out_type) {
  const DType type = operation.fingerprint.type;
  const ReduceOp op = operation.fingerprint.op;
  const char* arrived[kMaxEagerRanks] = {};
  for (int rank = 0; rank < host.size(); ++rank) {
    if (rank != host.rank()) arrived[rank] = host.Await(rank).data;
  }
  const void* all[kMaxEagerRanks];
  const size_t element = SizeOf(type), wider = SizeOf(out_type) / element;
  for (size_t done = 0; done < operation.in.bytes();) {
    const auto own = operation.in.At(done);
    const auto to = out.At(done * wider);
    const size_t bytes = std::min(own.bytes, to.bytes / wider);
    for (int rank = 0; rank < host.size(); ++rank) {
      // This rank's own input is read from the caller's memory instead of its eager slot. The copy
      // in the slot has just been stored, and the CPU would have to wait until the store has
      // completed.
      all[rank] = rank == host.rank() ? own.data : arrived[rank] + done;
    }
    Reduce({type, op, divisor, all, host.size(), bytes / element, to.data, out_type});
    done += bytes;
  }
}

bool FitsEagerSlots(size_t bytes, int ranks) {
  return ranks <= kMaxEagerRanks && bytes <= EagerSlot::kBytes &&
         bytes * static_cast<size_t>(ranks) <= 8 * EagerSlot::kBytes;
}

Algorithm BetweenHosts(size_t bytes, int members) {
  if (bytes <= kOneShotBytes && members <= kMaxOneShotRanks) return Algorithm::kOneShot;
  return members <= kMaxTwoShotRanks ? Algorithm::kTwoShot : Algorithm::kRing;
}

void OverLinks(Fabric& fabric, const Operation& operation, const Members& members,
               Transfer transfer, Algorithm algorithm) {
  const int size = static_cast<int>(members.ranks.size());
  transfer.part_bytes = CutEvenly(transfer.in.bytes(), SizeOf(transfer.type), size, size);
  // Whether this is the whole all-reduce, instead of only the step between the hosts of a
  // hierarchical all-reduce. Only in this case is the algorithm recorded as the algorithm of the
  // operation.
  const bool whole = algorithm != Algorithm::kAuto ||
                     static_cast<int>(fabric.topology.hosts.size()) == fabric.topology.size;
  if (algorithm == Algorithm::kAuto) { algorithm = BetweenHosts(transfer.in.bytes(), size); }
  // A ring rounds the partial results at every hop. If they need a wider type, this would lose
  // precision, so `RunTwoShot` is used instead.
  const bool rounds = PartialType(transfer.type, transfer.op) != transfer.type;
  if (rounds && algorithm == Algorithm::kRing) algorithm = Algorithm::kTwoShot;
  if (whole) fabric.recorder.Chose(static_cast<uint8_t>(algorithm));
  switch (algorithm) {
    case Algorithm::kOneShot:
      return RunOneShot(fabric, operation.fingerprint, members, transfer);
    case Algorithm::kRing:
      return RunRing(fabric, operation.fingerprint, members, transfer);
    default:
      return RunTwoShot(fabric, operation.fingerprint, members, transfer);
  }
}

void Compress(Fabric& fabric, const Operation& operation, const Members& members, Transfer transfer,
              size_t begin) {
  const int size = static_cast<int>(members.ranks.size());
  transfer.part_bytes = CutEvenly(transfer.in.bytes(), SizeOf(transfer.type), size, size);
  RunCompressed(fabric, operation.fingerprint, members, transfer, *operation.compression, begin);
}

// Rounds `sums` from the type `from_type` to the type `type`, which is half as wide, and writes the
// results to `out`.
void Narrow(const BufferList& sums, DType from_type, DType type, const BufferList& out) {
  size_t done = 0;
  out.ForEach(0, out.bytes(), [&](char* to, size_t bytes) {
    const void* from = sums.At(2 * done).data;
    Reduce({from_type, ReduceOp::kSum, 1.0, &from, 1, bytes / SizeOf(type), to, type});
    done += bytes;
  });
}

// A hierarchical all-reduce. First, the ranks of each host reduce their inputs. Then the hosts
// all-reduce these sums. Finally, each host distributes the result to its ranks. Between the first
// and the last step, the sums are stored in the partial type (`PartialType`), so that they are
// rounded to the type of the result only once.
class Hierarchical {
 public:
  Hierarchical(Fabric& fabric, const Operation& operation)
      : fabric_(fabric), host_(*fabric.host), operation_(operation) {
    for (const auto& ranks : fabric.topology.hosts) {
      leaders_ = std::min(leaders_, ranks.size());
      max_ranks_ = std::max(max_ranks_, ranks.size());
    }
    type_ = operation.fingerprint.type;
    partial_type_ = PartialType(type_, operation.fingerprint.op);
    widens_ = max_ranks_ > 1 && partial_type_ != type_;
  }

  void operator()() {
    const Transfer whole =
        Everything(operation_, host_.size(), static_cast<int>(leaders_), fabric_.topology.size);
    if (max_ranks_ == 1) {
      AmongHosts(whole, 0);
    } else if (!operation_.compression && leaders_ == max_ranks_ &&
               FitsEagerSlots(operation_.in.bytes(), host_.size())) {
      Small(whole);
    } else {
      Large(whole);
    }
  }

 private:
  // All-reduces the sums of this rank's host with the sums of the other hosts.
  // Args: begin: the offset in bytes of the transfer's first value among all values of the
  // operation.
  void AmongHosts(const Transfer& transfer, size_t begin) {
    const Members members = Counterparts(fabric_.topology);
    fabric_.recorder.BetweenHosts(true);
    if (operation_.compression) {
      Compress(fabric_, operation_, members, transfer, begin);
    } else {
      OverLinks(fabric_, operation_, members, transfer, Algorithm::kAuto);
    }
    fabric_.recorder.BetweenHosts(false);
  }

  Transfer Between(Transfer transfer, const BufferList& sums) {
    if (widens_) transfer.type = partial_type_;
    transfer.in = sums.Const();
    transfer.out = sums;
    return transfer;
  }

  // For small inputs: every rank computes all sums of its host by itself. Each rank then
  // all-reduces these sums with its counterparts, which are the ranks at the same position on the
  // other hosts. No rank needs to distribute a result within its host.
  void Small(const Transfer& whole) {
    BufferList sums = operation_.out;
    if (widens_) sums = BufferList(Take(2 * sums.bytes()), 2 * sums.bytes());
    const Transfer between = Between(whole, sums);
    ReduceEagerly(host_, operation_, 1.0, sums, between.type);
    AmongHosts(between, 0);
    if (widens_) Narrow(sums, partial_type_, type_, operation_.out);
  }

  // For large inputs: each rank of a host computes one part of the host's sums. The rank then
  // all-reduces this part with its counterparts on the other hosts, and shares the result with the
  // other ranks of its host.
  void Large(const Transfer& whole) {
    const size_t bytes = whole.part_bytes[static_cast<size_t>(host_.rank())];
    const size_t sum_bytes = widens_ ? 2 * bytes : bytes;
    const BufferList sums(Take(sum_bytes + bytes), sum_bytes);
    Transfer inside = whole;
    inside.gather = false;
    inside.divisor = 1.0;
    inside.widens = widens_;
    inside.out = sums;
    if (host_.size() > 1) {
      RunShm(host_, inside);
    } else {
      ReducePart(inside, 0, 0, bytes, {nullptr});
    }
    if (host_.rank() < static_cast<int>(leaders_)) {
      AmongHosts(Between(whole, sums), whole.Begin(host_.rank()));
    }
    Transfer back = whole;
    back.scatter = false;
    back.in = sums.Const();
    if (widens_) {
      const BufferList rounded(sums.At(0).data + sum_bytes, bytes);
      Narrow(sums, partial_type_, type_, rounded);
      back.in = rounded.Const();
    }
    if (host_.size() > 1) {
      RunShm(host_, back);
    } else {
      CopyPart(back, 0, 0, bytes);
    }
  }

  char* Take(size_t bytes) { return fabric_.host_scratch.Take(std::max<size_t>(bytes, 1)); }

  Fabric& fabric_;
  Host& host_;
  const Operation& operation_;
  DType type_;
  DType partial_type_;
  // The number of ranks of each host that exchange data with other hosts. It is the number of ranks
  // of the smallest host, so that each of these ranks has a counterpart on every host.
  size_t leaders_ = SIZE_MAX;
  size_t max_ranks_ = 0;  // the number of ranks of the largest host
  bool widens_;
};

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

const char* NameOf(Algorithm algorithm) {
  for (const auto& [name, known] : kAlgorithms) {
    if (algorithm == known) return name;
  }
  return "unknown algorithm";
}

void AllReduce(Fabric& fabric, Operation& operation, Algorithm algorithm) {
  CheckReducible(operation.fingerprint.type, operation.fingerprint.op);
  const Topology& topology = fabric.topology;
  Host& host = *fabric.host;
  const bool one_host = topology.hosts.size() == 1;
  if (operation.compression) {
    CheckCompressible(operation);
    if (!IsEncoded(topology, *operation.compression)) {
      operation.compression.reset();
    } else if (operation.compression->within_hosts) {
      host.Arrive(operation.fingerprint, ConstBufferList());
      host.AwaitAll();
      const Transfer whole = Everything(operation, topology.size, topology.size, topology.size);
      return Compress(fabric, operation, Everyone(topology), whole, 0);
    } else {
      algorithm = Algorithm::kHierarchical;
    }
  }
  if (algorithm == Algorithm::kAuto) {
    algorithm = one_host ? Algorithm::kShm : Algorithm::kHierarchical;
  }
  if ((algorithm == Algorithm::kShm && !one_host) || topology.size == 1) {
    algorithm = Algorithm::kHierarchical;
  }
  const bool small = !operation.compression && FitsEagerSlots(operation.in.bytes(), host.size()) &&
                     (algorithm == Algorithm::kShm || algorithm == Algorithm::kHierarchical);
  fabric.recorder.Chose(static_cast<uint8_t>(algorithm));
  host.Arrive(operation.fingerprint, small ? operation.in : ConstBufferList());
  if (algorithm == Algorithm::kHierarchical) return Hierarchical(fabric, operation)();
  if (algorithm == Algorithm::kShm && small) {
    return ReduceEagerly(host, operation, Divisor(operation, topology.size), operation.out,
                         operation.fingerprint.type);
  }
  const Transfer whole = Everything(operation, topology.size, topology.size, topology.size);
  if (algorithm == Algorithm::kShm) return RunShm(host, whole);
  host.AwaitAll();
  OverLinks(fabric, operation, Everyone(topology), whole, algorithm);
}

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
  if (fabric.topology.hosts.size() == 1 && size > 1) { return RunShm(*fabric.host, transfer); }
  fabric.host->AwaitAll();
  RunTwoShot(fabric, operation.fingerprint, Everyone(fabric.topology), transfer);
}

}  // namespace tfdist
