#include "device/peers.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "collective/collectives.h"
#include "device/kernels/staging.h"
#include "device/nccl.h"
#include "error.h"

namespace tfdist {
namespace {

// Gathers `bytes` bytes from each process, in the order of the processes.
std::vector<char> Gather(Fabric& fabric, const Operation& operation, const void* own,
                         size_t bytes) {
  const auto size = static_cast<size_t>(fabric.topology.size);
  std::vector<char> all(bytes * size);
  Operation gather;
  gather.fingerprint = operation.fingerprint;
  gather.in = ConstBufferList(static_cast<const char*>(own), bytes);
  gather.out = BufferList(all.data(), all.size());
  gather.sent_rows = {bytes};
  gather.received_rows.assign(size, bytes);
  AllGather(fabric, gather);
  return all;
}

// Returns the test value that the rank `writer` writes to the memory of the rank `owner`. The value
// is different for each pair of ranks. In the memory of the owner, each writer has a word of its
// own.
uint64_t Probe(size_t writer, size_t owner) {
  return uint64_t{0x7fd157} + writer * device::kMaxRanks + owner;
}

// Copies single words from the host to the memory of a GPU, and back.
class Word {
 public:
  explicit Word(const Gpu& gpu) : stream_(gpu), host_(gpu, sizeof(uint64_t)) {}

  void Copy(uint64_t value, cuda::Address to) {
    *word() = value;
    Move(to, reinterpret_cast<uintptr_t>(word()));
  }
  uint64_t Fetch(cuda::Address from) {
    *word() = 0;
    Move(reinterpret_cast<uintptr_t>(word()), from);
    return *word();
  }

 private:
  uint64_t* word() const { return static_cast<uint64_t*>(host_.data()); }
  void Move(cuda::Address to, cuda::Address from) {
    stream_.Copy(to, from, sizeof(uint64_t));
    stream_.Synchronize();
  }

  const DeviceStream stream_;
  const MappedMemory host_;
};

}  // namespace

bool AreSame(const cuda::Uuid& a, const cuda::Uuid& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

std::vector<PeerInfo> ExchangePeerInfo(Fabric& fabric, const Operation& operation,
                                       const std::vector<PeerInfo>& own) {
  const Topology& topology = fabric.topology;
  const auto processes = static_cast<size_t>(topology.size);
  const uint64_t count = own.size();
  std::vector<uint64_t> counts(processes);
  const std::vector<char> told = Gather(fabric, operation, &count, sizeof(count));
  std::memcpy(counts.data(), told.data(), told.size());
  for (size_t process = 1; process < processes; ++process) {
    if (counts[process] == counts[0]) continue;
    throw Error(Code::kMismatch, "All workers must have the same number of GPUs. Received: " +
                                     std::to_string(counts[0]) + " on " + topology.names[0] + ", " +
                                     std::to_string(counts[process]) + " on " +
                                     topology.names[process] + ".");
  }
  const std::vector<char> all =
      Gather(fabric, operation, own.data(), own.size() * sizeof(PeerInfo));
  std::vector<PeerInfo> ranks(processes * own.size());
  std::memcpy(ranks.data(), all.data(), all.size());
  for (PeerInfo& rank : ranks) {
    for (char* end : {std::end(rank.transport), std::end(rank.place), std::end(rank.model),
                      std::end(rank.lack)}) {
      end[-1] = 0;
    }
  }
  return ranks;
}

std::vector<size_t> TellAll(Fabric& fabric, const Operation& operation,
                            const std::vector<size_t>& own) {
  const std::vector<char> told = Gather(fabric, operation, own.data(), own.size() * sizeof(size_t));
  std::vector<size_t> all(told.size() / sizeof(size_t));
  std::memcpy(all.data(), told.data(), told.size());
  return all;
}

std::vector<double> LargestOfAll(Fabric& fabric, const Operation& operation,
                                 const std::vector<double>& own) {
  const std::vector<char> told = Gather(fabric, operation, own.data(), own.size() * sizeof(double));
  std::vector<double> all(told.size() / sizeof(double)), largest = own;
  std::memcpy(all.data(), told.data(), told.size());
  for (size_t i = 0; i < all.size(); ++i) {
    double& most = largest[i % own.size()];
    most = std::max(most, all[i]);
  }
  return largest;
}

bool AllAgree(Fabric& fabric, const Operation& operation, bool here) {
  const char own = here ? 1 : 0;
  const std::vector<char> all = Gather(fabric, operation, &own, 1);
  return std::count(all.begin(), all.end(), 1) == fabric.topology.size;
}

std::string FirstLack(Fabric& fabric, const Operation& operation, const std::string& own) {
  constexpr size_t kBytes = sizeof(PeerInfo::lack);
  char text[kBytes] = {};
  std::strncpy(text, own.c_str(), kBytes - 1);
  const std::vector<char> all = Gather(fabric, operation, text, kBytes);
  for (size_t process = 0; process * kBytes < all.size(); ++process) {
    const char* const lack = &all[process * kBytes];
    if (*lack) return "on " + fabric.topology.names[process] + ", " + lack;
  }
  return "";
}

nccl::UniqueId IdOfRankZero(Fabric& fabric, const Operation& operation, const nccl::UniqueId& own) {
  nccl::UniqueId first;
  std::memcpy(&first, Gather(fabric, operation, &own, sizeof(own)).data(), sizeof(first));
  return first;
}

cuda::Uuid NewName() {
  std::random_device random;
  cuda::Uuid made;
  for (char& byte : made.bytes) byte = static_cast<char>(random());
  return made;
}

cuda::Uuid ThisProcess() {
  static const cuda::Uuid name = NewName();
  return name;
}

Peers::Peers(const Gpu& gpu, const std::vector<PeerInfo>& ranks, size_t rank)
    : gpu_(gpu), rank_(rank) {
  for (const PeerInfo& each : ranks) {
    if (AreSame(each.process, ranks[rank].process)) {
      if (!AreSame(each.gpu, ranks[rank].gpu)) gpu.ReachInto(each.number);
      shared_.push_back({each.staging_address, each.words_address});
      continue;
    }
    try {
      opened_.push_back(std::make_unique<Opened>(gpu, each));
    } catch (const Error& error) {
      throw Error(error.code(), std::string(error.what()) +
                                    " Workers in separate containers need the host's IPC and PID "
                                    "namespaces (--ipc=host --pid=host)");
    }
    shared_.push_back({opened_.back()->staging.address(), opened_.back()->words.address()});
  }
}

bool Peers::Write() const {
  try {
    Word word(gpu_);
    for (size_t owner = 0; owner < shared_.size(); ++owner) {
      word.Copy(Probe(rank_, owner), shared_[owner].staging + rank_ * sizeof(uint64_t));
    }
    return true;
  } catch (const Error&) { return false; }
}

bool Peers::Read() const {
  try {
    Word word(gpu_);
    bool good = true;
    for (size_t owner = 0; owner < shared_.size(); ++owner) {
      for (size_t writer = 0; writer < shared_.size(); ++writer) {
        const cuda::Address from = shared_[owner].staging + writer * sizeof(uint64_t);
        good = good && word.Fetch(from) == Probe(writer, owner);
      }
    }
    return good;
  } catch (const Error&) { return false; }
}

namespace {

// Returns whether each rank has a GPU of its own, or a test allows ranks to share a GPU. If ranks
// share a GPU, the GPU may run their kernels one after another. A kernel that waits could then
// block the very kernel for which it waits.
bool HaveOwnGpus(const DeviceGroup& group) {
  std::set<std::string> gpus;
  for (const PeerInfo& rank : group.ranks) {
    gpus.insert(std::string(rank.gpu.bytes, sizeof(rank.gpu.bytes)));
  }
  return group.may_share_gpu || gpus.size() == group.ranks.size();
}

// Returns why ranks that share a GPU cannot let their streams wait for other ranks, or "" if they
// can. Ranks of different processes can do this, because the GPU switches between their streams.
// This is slow, so they do it only if the settings request "p2p". Ranks of the same process cannot
// do this, because the work of one stream may be queued behind a wait of the other stream.
std::string WhyNoStreams(const DeviceGroup& group) {
  if (std::strcmp(group.ranks[0].transport, "p2p") != 0) return "two ranks have the same GPU";
  for (size_t rank = 0; rank < group.ranks.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      if (AreSame(group.ranks[other].gpu, group.ranks[rank].gpu) &&
          AreSame(group.ranks[other].process, group.ranks[rank].process)) {
        return group.topology.names[other] + " and " + group.topology.names[rank] +
               ", of one process, have the same GPU";
      }
    }
  }
  return "";
}

}  // namespace

bool StreamsWait(const DeviceGroup& group) { return group.streams_wait || !HaveOwnGpus(group); }

std::string WhyNoKernels(const DeviceGroup& group) {
  if (group.topology.hosts.size() > 1) return "there are several hosts";
  if (group.ranks.size() > device::kMaxRanks) return "there are more than 16 ranks";
  const std::string no_streams = HaveOwnGpus(group) ? "" : WhyNoStreams(group);
  if (!no_streams.empty()) return no_streams;
  for (size_t rank = 0; rank < group.ranks.size(); ++rank) {
    const PeerInfo& each = group.ranks[rank];
    if (StreamsWait(group) && !each.has_stream_waits) {
      return "two ranks have the same GPU, and the driver of " + group.topology.names[rank] +
             " has no cuStreamWaitValue64 for it";
    }
    if (*each.lack) return "on " + group.topology.names[rank] + ", " + each.lack;
    if (each.buffer_bytes != group.ranks[0].buffer_bytes) return "TFDIST_DEVICE_BUFFERS differs";
  }
  return "";
}

std::string WhyNoNccl(const DeviceGroup& group) {
  if (group.tls) return "TLS is set, but NCCL does not encrypt";
  const bool may_share =
      group.may_share_gpu || std::all_of(group.ranks.begin(), group.ranks.end(),
                                         [](const PeerInfo& rank) { return rank.nccl_shares; });
  if (!may_share && !HaveOwnGpus(group)) return "two ranks have the same GPU";
  // Unless ranks may share a GPU, NCCL does not accept ranks on different partitions of the same
  // GPU either.
  std::set<std::pair<int, std::string>> places;
  for (size_t rank = 0; rank < group.ranks.size(); ++rank) {
    if (!places.emplace(group.topology.host_of[rank], group.ranks[rank].place).second &&
        !may_share) {
      return "two ranks have partitions of the same GPU";
    }
  }
  for (size_t rank = 0; rank < group.ranks.size(); ++rank) {
    if (group.ranks[rank].nccl == 0) return group.topology.names[rank] + " uses none";
  }
  for (size_t rank = 1; rank < group.ranks.size(); ++rank) {
    if (group.ranks[rank].nccl != group.ranks[0].nccl) {
      return group.topology.names[0] + " has " + nccl::VersionOf(group.ranks[0].nccl) + ", and " +
             group.topology.names[rank] + " has " + nccl::VersionOf(group.ranks[rank].nccl);
    }
  }
  return "";
}

std::string HowGpusDiffer(const DeviceGroup& group) {
  for (size_t rank = 1; rank < group.ranks.size(); ++rank) {
    if (std::strcmp(group.ranks[rank].model, group.ranks[0].model) != 0) {
      return group.topology.names[0] + " has " + group.ranks[0].model + ", and " +
             group.topology.names[rank] + " has " + group.ranks[rank].model;
    }
  }
  return "";
}

size_t MinBufferBytes(const DeviceGroup& group) {
  const auto less = [](const PeerInfo& a, const PeerInfo& b) {
    return a.buffer_bytes < b.buffer_bytes;
  };
  return std::min_element(group.ranks.begin(), group.ranks.end(), less)->buffer_bytes;
}

void CheckTransports(const DeviceGroup& group) {
  for (size_t rank = 1; rank < group.ranks.size(); ++rank) {
    if (std::strcmp(group.ranks[rank].transport, group.ranks[0].transport) != 0) {
      throw Error(Code::kMismatch,
                  "TFDIST_DEVICE_ALGORITHM must be the same on all ranks. "
                  "Received: '" +
                      std::string(group.ranks[0].transport) + "' on " + group.topology.names[0] +
                      ", '" + group.ranks[rank].transport + "' on " + group.topology.names[rank] +
                      ".");
    }
  }
}

}  // namespace tfdist
