#include "device/peers.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "collective/collectives.h"
#include "error.h"

namespace tfdist {
namespace {

// So many bytes of each rank, in the order of the ranks.
std::vector<char> Gather(Fabric& fabric, const Operation& operation, const void* own,
                         size_t bytes) {
  const auto size = static_cast<size_t>(fabric.topology.size);
  std::vector<char> all(bytes * size);
  Operation gather;
  gather.fingerprint = operation.fingerprint;
  gather.in = ConstPieces(static_cast<const char*>(own), bytes);
  gather.out = Pieces(all.data(), all.size());
  gather.sent_rows = {bytes};
  gather.received_rows.assign(size, bytes);
  AllGather(fabric, gather);
  return all;
}

}  // namespace

bool AreSame(const cuda::Uuid& a, const cuda::Uuid& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

std::vector<Introduction> Introduce(Fabric& fabric, const Operation& operation,
                                    const Introduction& own) {
  const std::vector<char> all = Gather(fabric, operation, &own, sizeof(own));
  std::vector<Introduction> ranks(static_cast<size_t>(fabric.topology.size));
  std::memcpy(ranks.data(), all.data(), all.size());
  for (Introduction& rank : ranks) {
    rank.transport[sizeof(rank.transport) - 1] = rank.place[sizeof(rank.place) - 1] = 0;
  }
  return ranks;
}

bool AllAgree(Fabric& fabric, const Operation& operation, bool here) {
  const char own = here ? 1 : 0;
  const std::vector<char> all = Gather(fabric, operation, &own, 1);
  return std::count(all.begin(), all.end(), 1) == fabric.topology.size;
}

nccl::UniqueId IdOfRankZero(Fabric& fabric, const Operation& operation, const nccl::UniqueId& own) {
  nccl::UniqueId first;
  std::memcpy(&first, Gather(fabric, operation, &own, sizeof(own)).data(), sizeof(first));
  return first;
}

cuda::Uuid ThisProcess() {
  static const cuda::Uuid name = [] {
    std::random_device random;
    cuda::Uuid made;
    for (char& byte : made.bytes) byte = static_cast<char>(random());
    return made;
  }();
  return name;
}

Peers::Peers(const Gpu& gpu, const std::vector<Introduction>& ranks, int rank)
    : rank_(static_cast<size_t>(rank)) {
  for (const Introduction& each : ranks) {
    if (AreSame(each.process, ranks[rank_].process)) {
      shared_.push_back({each.staging_address, each.words_address});
      continue;
    }
    opened_.push_back(std::make_unique<Opened>(gpu, each));
    shared_.push_back({opened_.back()->staging.address(), opened_.back()->words.address()});
  }
}

bool Peers::Probe(Fabric& fabric, const Operation& operation, const Gpu& gpu) {
  // Each rank has a word of each other one's in each staging buffer.
  const auto value = [](size_t writer, size_t owner) {
    return uint64_t{0x7fd157} + writer * device::kMostRanks + owner;
  };
  const size_t size = shared_.size();
  const DeviceStream stream(gpu);
  const MappedMemory host(gpu, sizeof(uint64_t));
  auto* const word = static_cast<uint64_t*>(host.data());
  const auto address = reinterpret_cast<uintptr_t>(word);
  const auto can = [](const std::function<void()>& copy) {
    try {
      copy();
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  bool good = can([&] {
    for (size_t owner = 0; owner < size; ++owner) {
      *word = value(rank_, owner);
      stream.Copy(shared_[owner].staging + rank_ * sizeof(*word), address, sizeof(*word));
      stream.Synchronize();
    }
  });
  Operation barrier;
  barrier.fingerprint = operation.fingerprint;
  Barrier(fabric, barrier);
  good = can([&] {
    for (size_t owner = 0; owner < size; ++owner) {
      for (size_t writer = 0; writer < size; ++writer) {
        *word = 0;
        stream.Copy(address, shared_[owner].staging + writer * sizeof(*word), sizeof(*word));
        stream.Synchronize();
        good = good && *word == value(writer, owner);
      }
    }
  }) && good;
  return good;
}

}  // namespace tfdist
