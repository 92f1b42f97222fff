#include "device/routes.h"

#include <atomic>
#include <functional>
#include <utility>

#include "error.h"

namespace tfdist {
namespace {

constexpr size_t kMaxOneShotBytes = size_t{256} << 10;

// Returns the topology in which each GPU is a rank. Its names and hosts are derived from the names
// and the hosts of the processes.
// Args: processes: the topology in which each process is a rank; gpus: the number of GPUs of each
// process.
Topology TopologyOf(const Topology& processes, size_t gpus) {
  std::vector<std::string> names;
  std::vector<int> hosts;
  for (size_t process = 0; process < processes.names.size(); ++process) {
    for (size_t gpu = 0; gpu < gpus; ++gpu) {
      const std::string suffix = gpus > 1 ? " GPU " + std::to_string(gpu) : "";
      names.push_back(processes.names[process] + suffix);
      hosts.push_back(processes.host_of[process]);
    }
  }
  return Topology::From(processes.rank * static_cast<int>(gpus), std::move(names), hosts);
}

}  // namespace

void Routes::Open(Fabric& fabric, const Operation& operation) {
  if (!group_.ranks.empty()) return;
  try {
    ExchangeInfo(fabric, operation);
  } catch (...) {
    group_.ranks.clear();
    throw;
  }
}

void Routes::ExchangeInfo(Fabric& fabric, const Operation& operation) {
  int version = 0;
  bool shares = false;
  std::string no_nccl = "no library is given";
  if (!setup_.nccl.empty()) {
    try {
      const nccl::Library& library = nccl::Load(setup_.nccl);
      version = library.version;
      shares = nccl::LetsRanksShareAGpu(library);
    } catch (const Error& error) {
      no_nccl = error.what();
      if (setup_.warn && setup_.is_free()) setup_.warn(no_nccl);
    }
  }
  std::vector<PeerInfo> own;
  for (const auto& rank : ranks_) {
    own.push_back(rank->MakePeerInfo(setup_));
    own.back().nccl = version;
    own.back().nccl_shares = shares;
    own.back().communicator = NewName();
  }
  group_.ranks = ExchangePeerInfo(fabric, operation, own);
  group_.topology = TopologyOf(fabric.topology, ranks_.size());
  group_.tls = setup_.tls;
  group_.may_share_gpu = setup_.may_share_gpu;
  group_.streams_wait = setup_.streams_wait;
  CheckTransports(group_);
  no_nccl_ = WhyNoNccl(group_);
  if (setup_.transport == "nccl" && !MayUseNccl()) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_ALGORITHM=nccl needs one version of NCCL on all ranks, and one GPU "
                "per rank (or, since NCCL 2.30, NCCL_MULTI_RANK_GPU_ENABLE=1), but " +
                    no_nccl_ + "." + (version || group_.tls ? "" : " Here: " + no_nccl));
  }
  if (MayUseNccl()) {
    const bool first = fabric.topology.rank == 0;
    id_ = IdOfRankZero(fabric, operation, first ? NcclGroup::NewId() : nccl::UniqueId{});
  }
  OpenPeers(fabric, operation);
  AnnounceNoNccl();
  if (!IsMessage(operation.fingerprint.kind)) AnnounceUnlikeGpus();
}

void Routes::OpenPeers(Fabric& fabric, const Operation& operation) {
  if (!setup_.is_free() && setup_.transport != "p2p") return;
  lack_ = WhyNoKernels(group_);
  if (!lack_.empty()) {
    if (group_.topology.hosts.size() == 1) Announce();
    return;
  }
  const auto try_to = [&](const std::function<void(DeviceRank&, size_t)>& body) {
    std::string lack;
    try {
      for (size_t i = 0; i < ranks_.size(); ++i) body(*ranks_[i], first() + i);
    } catch (const Error& error) { lack = ClauseOf(error); }
    lack_ = FirstLack(fabric, operation, lack);
    return lack_.empty();
  };
  const auto need = [](bool good) {
    if (good) return;
    throw Error(Code::kUnavailable,
                "data written by one GPU are wrong when another one reads them");
  };
  const bool good = try_to([&](DeviceRank& rank, size_t number) {
                      rank.peers = std::make_unique<Peers>(*rank.gpu, group_.ranks, number);
                    }) &&
                    try_to([&](DeviceRank& rank, size_t) { need(rank.peers->Write()); }) &&
                    try_to([&](DeviceRank& rank, size_t) { need(rank.peers->Read()); }) &&
                    try_to([&](DeviceRank& rank, size_t number) {
                      if (StreamsWait(group_)) OpenStreamBarriers(fabric, rank, number);
                      rank.own = std::make_unique<KernelAllReduce>(KernelAllReduce::Setup{
                          rank.gpu.get(), &*rank.kernels, static_cast<uint32_t>(number),
                          rank.peers->shared(), setup_.buffer_bytes, kMaxOneShotBytes,
                          setup_.timeout_seconds, rank.stream_barriers.get()});
                    });
  if (good) return;
  for (const auto& rank : ranks_) {
    rank->own = nullptr;
    rank->stream_barriers = nullptr;
    rank->peers = nullptr;
  }
  Announce();
}

void Routes::OpenStreamBarriers(Fabric& fabric, DeviceRank& rank, size_t number) const {
  static_assert(StreamBarriers::kWordBytes <= Segment::kStreamWordBytes);
  if (!fabric.host->has_segment()) {
    throw Error(Code::kUnavailable, "the ranks have the same GPU, but no shared host memory");
  }
  rank.stream_barriers = std::make_unique<StreamBarriers>(
      *rank.gpu, fabric.host->segment().stream_words(), static_cast<uint32_t>(number),
      static_cast<uint32_t>(group_.ranks.size()));
}

// Warns that the GPUs do not access each other's memory, which is the fastest transport, and
// explains why. Only the first process warns.
void Routes::Announce() const {
  if (first() != 0 || !setup_.warn || !setup_.is_free()) return;
  setup_.warn("The GPUs do not access each other's memory, since " + lack_ +
              ". All-reduces go through " + (MayUseNccl() ? "NCCL." : "the host's memory."));
}

// Warns if there are several hosts and NCCL is not used, because the other transports are slow
// between hosts. Only the first process warns.
void Routes::AnnounceNoNccl() const {
  const bool wanted = group_.topology.hosts.size() > 1 && setup_.is_free();
  if (!wanted || first() != 0 || !setup_.warn || MayUseNccl()) return;
  setup_.warn("NCCL is not used, since " + no_nccl_ +
              ". All-reduces of GPU memory go through the host's memory.");
}

// Warns if the GPUs are of different models. Only the first process warns, and only once.
void Routes::AnnounceUnlikeGpus() const {
  static std::atomic<bool> announced{false};
  const std::string differ = HowGpusDiffer(group_);
  if (differ.empty() || first() != 0 || !setup_.warn || announced.exchange(true)) return;
  setup_.warn("The GPUs are of different models: " + differ +
              ". Each step takes as long as on the slowest.");
}

bool Routes::HaveChoice() const {
  return setup_.transport.empty() && ranks_[0]->own && MayUseNccl();
}

Routes::Transport Routes::Choose(const Fingerprint& asked, const Parts& parts) const {
  if (setup_.transport == "host") return Transport::kHost;
  if (setup_.transport == "p2p" && !ranks_[0]->own) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_ALGORITHM=p2p needs GPUs that can access each other's memory. They "
                "cannot, since " +
                    lack_ + ".");
  }
  const bool reduces = IsReduction(asked.kind);
  const size_t bytes = parts[0]->in.bytes();
  if ((reduces || asked.kind == Kind::kBroadcast) && bytes == 0) return Transport::kHost;
  if (IsMessage(asked.kind) && ranks_[0]->own) return Transport::kP2p;
  const bool nccl =
      setup_.transport != "p2p" && MayUseNccl() && (!reduces || NcclSupports(asked.type, asked.op));
  if (asked.kind == Kind::kAllReduce && ranks_[0]->own && (!nccl || bytes <= max_kernel_bytes_)) {
    return Transport::kP2p;
  }
  return nccl ? Transport::kNccl : Transport::kHost;
}

Routes::Transport Routes::ChooseForCompressed() const {
  const bool nccl = (setup_.is_free() || setup_.transport == "nccl") && MayUseNccl();
  return nccl ? Transport::kNccl : Transport::kHost;
}

}  // namespace tfdist
