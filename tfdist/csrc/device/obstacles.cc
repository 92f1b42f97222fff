#include "device/obstacles.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "device/kernels/waiting.h"
#include "device/nccl.h"
#include "error.h"

namespace tfdist {
namespace {

// Where ranks share a GPU, a kernel may be queued behind another one that waits for it.
bool HaveOwnGpus(const DeviceTeam& team) {
  std::set<std::string> gpus;
  for (const Introduction& rank : team.ranks) {
    gpus.insert(std::string(rank.gpu.bytes, sizeof(rank.gpu.bytes)));
  }
  return team.may_share_gpu || gpus.size() == team.ranks.size();
}

// Two ranks of one process whose GPU is the same: their streams, too, may be queued behind each other.
// Processes do not get into each other's way, but take turns on a GPU, which is slow.
std::string WhyNoStreams(const DeviceTeam& team) {
  if (std::strcmp(team.ranks[0].transport, "own") != 0) return "two ranks have the same GPU";
  for (size_t rank = 0; rank < team.ranks.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      if (AreSame(team.ranks[other].gpu, team.ranks[rank].gpu) &&
          AreSame(team.ranks[other].process, team.ranks[rank].process)) {
        return team.topology.names[other] + " and " + team.topology.names[rank] +
               ", of one process, have the same GPU";
      }
    }
  }
  return "";
}

}  // namespace

bool StreamsWait(const DeviceTeam& team) { return team.streams_wait || !HaveOwnGpus(team); }

std::string WhyNoKernels(const DeviceTeam& team) {
  if (team.topology.hosts.size() > 1) return "there are several hosts";
  if (team.ranks.size() > device::kMostRanks) return "there are more than 16 ranks";
  const std::string no_streams = HaveOwnGpus(team) ? "" : WhyNoStreams(team);
  if (!no_streams.empty()) return no_streams;
  for (size_t rank = 0; rank < team.ranks.size(); ++rank) {
    const Introduction& each = team.ranks[rank];
    if (StreamsWait(team) && !each.has_stream_waits) {
      return "two ranks have the same GPU, and the driver of " + team.topology.names[rank] +
             " has no cuStreamWaitValue64 for it";
    }
    if (*each.lack) return "on " + team.topology.names[rank] + ", " + each.lack;
    if (each.buffer_bytes != team.ranks[0].buffer_bytes) return "TFDIST_DEVICE_BUFFERS differs";
  }
  return "";
}

std::string WhyNoNccl(const DeviceTeam& team) {
  if (team.tls) return "TLS is set, and NCCL sends in the clear";
  const bool may_share =
      team.may_share_gpu || std::all_of(team.ranks.begin(), team.ranks.end(),
                                        [](const Introduction& rank) { return rank.nccl_shares; });
  if (!may_share && !HaveOwnGpus(team)) return "two ranks have the same GPU";
  // Which NCCL refuses otherwise.
  std::set<std::pair<int, std::string>> places;
  for (size_t rank = 0; rank < team.ranks.size(); ++rank) {
    if (!places.emplace(team.topology.host_of[rank], team.ranks[rank].place).second && !may_share) {
      return "two ranks have parts of the same GPU";
    }
  }
  for (size_t rank = 0; rank < team.ranks.size(); ++rank) {
    if (team.ranks[rank].nccl == 0) return team.topology.names[rank] + " uses none";
  }
  for (size_t rank = 1; rank < team.ranks.size(); ++rank) {
    if (team.ranks[rank].nccl != team.ranks[0].nccl) {
      return team.topology.names[0] + " has " + nccl::VersionOf(team.ranks[0].nccl) + ", and " +
             team.topology.names[rank] + " has " + nccl::VersionOf(team.ranks[rank].nccl);
    }
  }
  return "";
}

std::string HowGpusDiffer(const DeviceTeam& team) {
  for (size_t rank = 1; rank < team.ranks.size(); ++rank) {
    if (std::strcmp(team.ranks[rank].model, team.ranks[0].model) != 0) {
      return team.topology.names[0] + " has " + team.ranks[0].model + ", and " +
             team.topology.names[rank] + " has " + team.ranks[rank].model;
    }
  }
  return "";
}

size_t LeastBuffer(const DeviceTeam& team) {
  const auto less = [](const Introduction& a, const Introduction& b) {
    return a.buffer_bytes < b.buffer_bytes;
  };
  return std::min_element(team.ranks.begin(), team.ranks.end(), less)->buffer_bytes;
}

void CheckTransports(const DeviceTeam& team) {
  for (size_t rank = 1; rank < team.ranks.size(); ++rank) {
    if (std::strcmp(team.ranks[rank].transport, team.ranks[0].transport) != 0) {
      throw Error(Code::kMismatch, "TFDIST_DEVICE_ALGORITHM must be the same on all ranks. "
                                   "Received: '" + std::string(team.ranks[0].transport) + "' on " +
                                       team.topology.names[0] + ", '" +
                                       team.ranks[rank].transport + "' on " +
                                       team.topology.names[rank] + ".");
    }
  }
}

}  // namespace tfdist
